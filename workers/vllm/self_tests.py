"""Self-tests of a newly loaded engine: cache isolation, slicing, memory, speed, decode proofs."""

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from pydantic import JsonValue

from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.encoding import decode_vector
from poc_core.schemes.artifact.options import ArtifactOptions
from poc_core.schemes.decode.limits import ChainLimits, why_no_chains
from workers.engines import base, stages
from workers.engines.options import EngineOptions
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan
from workers.vllm.engine import VllmEngine
from workers.vllm.forward.recording import SWITCH

logger = logging.getLogger(__name__)

# Tokens of a nonce in the tests. Two short nonces have more than 32 tokens: up to 32, vLLM joins
# DeepSeek-V4's layers in kernels that add in another order, and that leave some residuals unwritten
# in 0.25.1. Real proofs are larger.
_SHORT = 32
_LONG = 1024
_USUAL = 256
_FEW = 4
# Tokens for the test of caches: more than most windows, and several blocks for each sequence.
_SEVERAL_BLOCKS = 160
_SEQUENCES = 3
_TRIES = 3


# Steps of a chain: a decode step begins the second block, and there are enough steps to expose a
# state of another sequence (with a tiny Qwen3-Next, 3 steps deviate by 0.08, 16 steps by 0.18).
_CHAIN_STEPS = 16
_CHAIN = ProofSpec(
    scheme="decode",
    block_hash="warm-up",
    public_key="warm-up",
    seq_len=31,
    options={"max_tokens": _CHAIN_STEPS},
)
# For as many nonces as fit: the first step is a warm-up, the second is recorded, two are replays.
_FEW_STEPS = _CHAIN.model_copy(update={"options": {"max_tokens": 4}})
# Most differences of chains with CUDA graphs, as a multiple of those of repeated plain chains.
_MOST_OTHERS = 3
# Seconds allowed for a call that records steps; all kernels are compiled by then.
_GRAPHS_TIMEOUT_S = 120.0
# Seconds until the memory of a killed engine is free.
_GPU_FREE_S = 10.0
# Ratio of a call's limit to the longest planned call: machines may be busy, first calls compile.
_CALL_MARGIN = 6
# Largest margin of a mismatch that rounding explains; wrong states give 0.1 or more.
_NEAR_TIE = 0.075
# Factor by which a run may exceed the spread of identical runs before it counts as different.
_MARGIN = 3.0
_REPEATS = 3


class RecordingError(ProoflineError):
    """An engine broke while it recorded or replayed decode steps."""


def load(options: EngineOptions, rpc_timeout_s: float) -> VllmEngine:
    """Returns an engine that has passed the self-tests. If it broke while recording decode steps,
    starts another engine that records none, because proofs and chat matter more.

    Raises the errors of VllmEngine and of the tests below; RecordingError only for an engine over
    several hosts, which must all use the same setting.
    """
    try:
        return _tested(options, rpc_timeout_s)
    except RecordingError as error:
        if options.span is not None:
            raise
        logger.warning("%s The engine starts again with this setting.", error)
        os.environ[SWITCH] = "off"  # inherited by the engine's processes
        time.sleep(_GPU_FREE_S)
        return _tested(options, rpc_timeout_s)


def _tested(options: EngineOptions, rpc_timeout_s: float) -> VllmEngine:
    engine = VllmEngine(options)
    try:
        stages.begin("self-test")
        check_isolation(engine)
        check_slices(engine)
        check_memory(engine, whole=engine.on_gpu)
        check_chains(engine)
        report_speed(engine)
        # Recording over several hosts is untested, and their ranks must agree on it.
        if engine.on_gpu and (options.span is None or os.environ.get(SWITCH) == "on"):
            check_graphs(engine)
    except BaseException:
        engine.close()
        raise
    engine.rpc_timeout_s = rpc_timeout_s
    engine.longest_call_s = rpc_timeout_s / _CALL_MARGIN
    logger.info("%s", described(engine))
    return engine


def check_isolation(engine: VllmEngine) -> None:
    """Computes artifacts with caches that layers share, and with separate caches. If the results
    are never bit-identical, layers stop sharing caches, also for irreproducible artifacts.
    ProoflineError if proofs write to chat's caches, or this model cannot compute proofs.
    """
    name = engine.info.name
    spec = _spec(min(_SEVERAL_BLOCKS, engine.info.max_seq_len, engine.info.max_batch_tokens))
    nonces = range(engine.info.max_batch(spec.seq_len))[:_SEQUENCES]
    shared = list[list[JsonValue]]()
    private = list[list[JsonValue]]()
    can_share = False
    try:
        engine.watch(len(nonces), spec.seq_len)
        # One bit-identical result suffices: with a wrong cache, no result is bit-identical.
        while not can_share and len(shared) < _TRIES:
            engine.settle(private=False, replicated=True)
            shared.append(compute_all(engine, spec, nonces))
            engine.settle(private=True, replicated=True)
            private.append(compute_all(engine, spec, nonces))
            can_share = any(values in private for values in shared)
        seen = engine.unwatch()
    except (base.EngineLostError, base.EngineMemoryError):
        raise
    except ProoflineError as error:
        raise ProoflineError(f"Proofs cannot be computed with {name}: {error}") from error
    if touched := [layer for rank in seen for layer in rank["touched"]]:
        raise ProoflineError(
            f"Proofs of {name} write into chat's cache of layer {touched[0]}; compute proofs with"
            " another model."
        )
    if not can_share:
        repeats = all(values == private[0] for values in private)
        unseen = "; its values differ in each run, so the test cannot show whether layers can share"
        logger.warning(
            "layers of %s cannot share a cache for proofs: each gets its own, which takes more"
            " memory%s",
            name,
            "" if repeats else unseen,
        )
    engine.info = dataclasses.replace(engine.info, caches="shared" if can_share else "private")
    engine.settle(not can_share, all(rank["replicated"] for rank in seen))


def check_slices(engine: base.Engine) -> None:
    """Computes a micro-batch at once, then layer by layer. Slicing is disabled if the two results
    are neither bit-identical nor as close as repeated runs are to each other.
    """
    spec = _spec(min(_SHORT, engine.info.max_seq_len, engine.info.max_batch_tokens))
    nonces = range(engine.info.max_batch(spec.seq_len))[:2]
    whole = compute_all(engine, spec, nonces)
    sliced = partial(_layer_by_layer, engine, spec, nonces)
    if not engine.sliceable or not as_near_as_repeats(engine, spec, nonces, whole, sliced):
        engine.sliceable = False
        logger.warning(
            "the layers of %s cannot be run one by one: chat waits for whole micro-batches of"
            " proofs. POC_MAX_STEP_MS keeps these short, which makes proofs several times slower:"
            " raise it where chat may wait longer",
            engine.info.name,
        )


def as_near_as_repeats(
    engine: base.Engine,
    spec: ProofSpec,
    nonces: Sequence[int],
    expected: list[JsonValue],
    compute: Callable[[], list[JsonValue] | None],
) -> bool:
    """Returns True if another computation gives the engine's artifacts: bit for bit at least once,
    or about as close as repeated runs. Tries several times, because perhaps one run in five
    differs. `expected`: the engine's artifacts. `compute`: the other computation; None on failure.
    """
    seen = compute()
    if seen is None or seen == expected:
        return seen is not None
    own = [expected, *(compute_all(engine, spec, nonces) for _ in range(_REPEATS))]
    if any(one in own for one in chain([seen], (compute() for _ in range(_REPEATS)))):
        return True
    k_dim = ArtifactOptions.of(spec).k_dim
    again = max(_apart(one, expected, k_dim) for one in own)
    apart = _apart(seen, expected, k_dim)
    if again:
        logger.info(
            "values of %s differ by %.4f between runs, and by %.4f here",
            engine.info.name,
            again,
            apart,
        )
    return apart <= _MARGIN * again < math.inf


def _apart(values: list[JsonValue], others: list[JsonValue], k_dim: int) -> float:
    """Returns the largest L2 distance of two runs' artifacts; infinite if one run lacks some."""
    pairs = [pair for pair in zip(values, others, strict=True) if pair[0] != pair[1]]
    if any(None in pair for pair in pairs):
        return math.inf
    vectors = [[decode_vector(str(value), k_dim) for value in pair] for pair in pairs]
    return max((float(np.linalg.norm(one - two)) for one, two in vectors), default=0.0)


def _layer_by_layer(
    engine: base.Engine, spec: ProofSpec, nonces: Sequence[int]
) -> list[JsonValue] | None:
    """Returns artifacts computed layer by layer; None if the model cannot stop between layers."""
    try:
        return compute_all(engine, spec, nonces, SlicePlan(0.0, 1))
    except (base.EngineLostError, base.EngineMemoryError):
        raise
    except ProoflineError:
        return None


def check_memory(engine: base.Engine, whole: bool) -> None:
    """Computes a micro-batch of the maximum size, and halves the maximum until the memory suffices.
    EngineMemoryError if not even one nonce fits. `whole`: False to compute only the first layer.
    """
    spec = _spec(min(_LONG, engine.info.max_seq_len, engine.info.max_batch_tokens))
    asked = engine.info.max_batch_tokens
    if whole:
        # Layer by layer: a lack of memory between two pipeline stages would lose the engine.
        compute_all(engine, spec, range(engine.info.max_batch(spec.seq_len)), SlicePlan(0.0, 1))
    else:
        _check_first_layer(engine, spec)
    found = engine.info.max_batch_tokens
    if found < asked:
        logger.warning(
            "micro-batches hold %d tokens: there is no memory for the requested %d",
            found,
            asked,
        )


def report_speed(engine: VllmEngine) -> None:
    """Measures and logs the speed of a full micro-batch on a GPU, of a small one on a CPU."""
    info = engine.info
    seq_len = min(_LONG if engine.on_gpu else _USUAL, info.max_seq_len, info.max_batch_tokens)
    nonces = range(info.max_batch(seq_len))[: None if engine.on_gpu else _FEW]
    plan = SlicePlan(0.0, 1) if engine.on_gpu else None  # check_memory has shown this to work
    began = time.monotonic()
    compute_all(engine, _spec(seq_len), nonces, plan)
    seconds = time.monotonic() - began
    engine.token_layer_s = seconds / (len(nonces) * seq_len * info.n_layers)
    stages.report_speed(len(nonces) / seconds, seq_len)


def check_chains(engine: VllmEngine) -> None:
    """Reserves memory for decode steps. Disables decode proofs if a short decode proof fails."""
    if why_no_chains(engine.info):
        return
    limits = ChainLimits.of(engine.info).with_room(engine.reserve_for_steps(), _CHAIN)
    engine.info = limits.on(engine.info)
    if limits.no_chains:
        return
    nonces = range(min(2, limits.max_batch(_CHAIN, engine.info)))
    seen: list[dict[str, Any]] | None = None
    try:
        engine.watch(len(nonces), _CHAIN.seq_len)
        chains = compute_all(engine, _CHAIN, nonces)
        seen = engine.unwatch()
        enforced = {str(nonce): chain for nonce, chain in zip(nonces, chains, strict=True)}
        claimed = _CHAIN.model_copy(update={"options": {**_CHAIN.options, "enforced": enforced}})
        judged: list[Any] = compute_all(engine, claimed, nonces)
    except (base.EngineLostError, base.EngineMemoryError):
        raise
    except ProoflineError as error:
        if seen is None:
            engine.unwatch()  # otherwise ranks would compare the layers of all later proofs
        _refuse_chains(engine, str(error))
        return
    if touched := [layer for rank in seen for layer in rank["touched"]]:
        _refuse_chains(engine, f"their steps write into chat's cache of layer {touched[0]}")
    elif any(one is None or one[1] > _NEAR_TIE for one in judged):
        _refuse_chains(engine, f"one forward does not follow the steps ({judged})")


def check_graphs(engine: VllmEngine) -> None:
    """Computes decode proofs with and without CUDA graphs, of two nonces and of as many as fit,
    because sums over ranks then use other kernels. Disables the graphs if results differ clearly
    more often than in repeated runs without graphs. RecordingError if the engine breaks.
    """
    if why_no_chains(engine.info):
        return
    room = ChainLimits.of(engine.info).max_batch(_CHAIN, engine.info)
    work = [(_CHAIN, range(min(2, room))), (_FEW_STEPS, range(room))]
    plain = [compute_all(engine, *one) for one in work]
    engine.rpc_timeout_s = _GRAPHS_TIMEOUT_S
    try:
        engine.use_graphs(True)
        replayed = [compute_all(engine, *one) for one in work]
        same = replayed == plain
        if not same:  # repeated runs without CUDA graphs may differ too
            engine.use_graphs(False)
            again = [compute_all(engine, *one) for one in work]
            same = _n_others(replayed, plain) <= _MOST_OTHERS * _n_others(again, plain)
        found = engine.use_graphs(same)
    except ProoflineError as error:
        raise RecordingError(
            f"Steps of decode proofs could not be recorded as CUDA graphs: {error}"
            f" {SWITCH}=off in the environment, on all hosts of an engine, prevents recording."
        ) from error
    if found["why_not"] or not same:
        why = found["why_not"] or f"replayed steps gave {replayed[0]} for {plain[0]}"
        logger.warning(
            "steps of decode proofs run without CUDA graphs with %s: %s", engine.info.name, why
        )
    else:
        logger.info("steps of decode proofs run as CUDA graphs")


def _n_others(chains: list[list[JsonValue]], plain: list[list[JsonValue]]) -> int:
    pairs = (zip(*both, strict=True) for both in zip(chains, plain, strict=True))
    return sum(one != other for both in pairs for one, other in both)


def _refuse_chains(engine: VllmEngine, why: str) -> None:
    refusal = f"Decode proofs cannot be computed with {engine.info.name}: {why}"
    logger.warning("%s", refusal)
    engine.info = ChainLimits.of(engine.info).refused(refusal).on(engine.info)


def described(engine: base.Engine) -> str:
    """Returns a line of text that describes how this engine computes proofs."""
    info = engine.info
    reflected = (
        "reflected after each"
        if info.layers_reflected
        else "none reflected, as the network's nodes find none"
    )
    return (
        f"proofs of {info.name}: {info.n_layers} layers at {info.layers}, {reflected}; caches "
        f"{'shared by layers' if info.caches == 'shared' else 'for each layer'}; "
        f"{'cut between layers for chat' if engine.sliceable else 'whole micro-batches'}; "
        f"at most {info.max_batch_tokens} tokens at a time"
    )


def _check_first_layer(engine: base.Engine, spec: ProofSpec) -> None:
    while True:
        n = engine.info.max_batch(spec.seq_len)
        try:
            first = base.Slice(0, 0, 1 if engine.sliceable else engine.stages[0].stop)
            engine.tick(base.Tick([base.MicroBatch(spec, range(n), id=0)], [first], wait=True))
            engine.tick(base.Tick(drop=[0]))
            return
        except base.EngineMemoryError:
            if n == 1:
                raise
            engine.info = dataclasses.replace(engine.info, max_batch_tokens=n // 2 * spec.seq_len)


def _spec(seq_len: int) -> ProofSpec:
    return ProofSpec(block_hash="warm-up", public_key="warm-up", seq_len=seq_len, options={})
