"""What a freshly loaded engine has to show: caches that are its own, slices that change
nothing, and a micro-batch as large as it may get.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import JsonValue

from poc_core.errors import ProoflineError
from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes.decode.options import PICKED
from workers.engines.base import Engine, EngineLostError, EngineMemoryError, MicroBatch, Slice, Tick
from workers.slice_plan import SlicePlan
from workers.vllm.start.repeats import as_near_as_repeats

logger = logging.getLogger(__name__)

# Tokens of a nonce in the trials. Two short ones are more than the 32 up to which vLLM joins
# DeepSeek-V4's layers in kernels that add in another order, and that leave some residuals unwritten
# in 0.25.1: proofs of use are larger.
_SHORT = 32
_LONG = 1024
# Of the test of the caches: more than most windows and blocks, so that each sequence takes several.
_SEVERAL_BLOCKS = 160
_SEQUENCES = 3


# Of the test of chains: two blocks, the second one begun by a step.
_CHAIN_STEPS = 3
_CHAIN = ProofSpec(
    scheme="decode",
    block_hash="warm-up",
    public_key="warm-up",
    seq_len=31,
    options={"max_tokens": _CHAIN_STEPS},
)
# Margin of a point that two roundings may disagree about; chains of other states lie 0.1 off and
# more.
_NEAR_TIE = 0.075


class Isolating(Protocol):
    """An engine whose proofs have caches of their own."""

    info: ModelInfo

    def compute(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]: ...

    def watch(self, n_sequences: int, seq_len: int) -> None:
        """On every rank, see ProofRunner.watch."""

    def unwatch(self) -> list[dict[str, Any]]:
        """Of every rank, see ProofRunner.unwatch."""

    def settle(self, private: bool, replicated: bool) -> None:
        """On every rank, see ProofRunner.settle."""


class Steppable(Isolating, Protocol):
    """One whose proofs may go on step by step."""

    def reserve_for_steps(self) -> int:
        """Makes room for the steps of decode proofs on every rank: tokens that each micro-batch
        may keep there.
        """


class Recording(Steppable, Protocol):
    """One whose steps may be recorded and replayed."""

    def use_graphs(self, on: bool) -> dict[str, Any]:
        """See ProofRunner.use_graphs."""


def prove_isolation(engine: Isolating) -> None:
    """Runs a small micro-batch with caches that layers share and one with a cache for each layer.
    Values that differ by a bit end the sharing with this model: also where it gives other bits each
    time, as nobody can tell then.

    ProoflineError: proofs touch chat's caches, or cannot be computed with this model at all.
    """
    name = engine.info.name
    spec = _spec(min(_SEVERAL_BLOCKS, engine.info.max_seq_len, engine.info.max_batch_tokens))
    nonces = range(engine.info.max_batch(spec.seq_len))[:_SEQUENCES]
    try:
        engine.watch(len(nonces), spec.seq_len)
        shared = engine.compute(spec, nonces)
        engine.settle(private=True, replicated=True)
        private = engine.compute(spec, nonces)
        seen = engine.unwatch()
    except (EngineLostError, EngineMemoryError):
        raise
    except ProoflineError as error:
        raise ProoflineError(f"Proofs cannot be computed with {name}: {error}") from error
    if touched := [layer for rank in seen for layer in rank["touched"]]:
        raise ProoflineError(
            f"Proofs of {name} write into chat's cache of layer {touched[0]}; compute proofs with"
            " another model."
        )
    if private != shared:
        repeats = engine.compute(spec, nonces) == private
        logger.warning(
            "layers of %s cannot share a cache for proofs: each gets its own, which takes more"
            " memory%s",
            name,
            (
                ""
                if repeats
                else "; its values differ each time, so whether they could cannot be seen"
            ),
        )
    engine.info = dataclasses.replace(
        engine.info, caches="shared" if private == shared else "private"
    )
    engine.settle(private != shared, all(rank["replicated"] for rank in seen))


def prove_slices(engine: Engine) -> None:
    """Runs a small micro-batch whole and layer by layer; values that differ by a bit end the
    slicing of this model. Where whole ones differ too, by more than those lie apart.
    """
    spec = _spec(min(_SHORT, engine.info.max_seq_len, engine.info.max_batch_tokens))
    nonces = range(engine.info.max_batch(spec.seq_len))[:2]
    whole = engine.compute(spec, nonces)
    sliced = _layer_by_layer(engine, spec, nonces) if engine.sliceable else None
    if sliced is None or not as_near_as_repeats(engine, spec, nonces, whole, sliced):
        engine.sliceable = False
        logger.warning(
            "the layers of %s cannot be run one by one: chat waits for whole micro-batches of"
            " proofs",
            engine.info.name,
        )


def _layer_by_layer(
    engine: Engine, spec: ProofSpec, nonces: Sequence[int]
) -> list[JsonValue] | None:
    """None: a model that does not stop after a layer takes what comes back for an error."""
    try:
        return engine.compute(spec, nonces, SlicePlan(0.0, 1))
    except (EngineLostError, EngineMemoryError):
        raise
    except ProoflineError:
        return None


def prove_budget(engine: Engine, whole: bool) -> None:
    """Runs one micro-batch of as many tokens as the engine may be given; halves that until the
    memory suffices.

    `whole`: through all layers, else through the first one, which needs as much memory.
    EngineMemoryError: not even one nonce fits.
    """
    spec = _spec(min(_LONG, engine.info.max_seq_len, engine.info.max_batch_tokens))
    asked = engine.info.max_batch_tokens
    if whole:
        # Layer by layer: memory that is short between two pipeline stages would lose the engine.
        engine.compute(spec, range(engine.info.max_batch(spec.seq_len)), SlicePlan(0.0, 1))
    else:
        _prove_first_layer(engine, spec)
    found = engine.info.max_batch_tokens
    if found < asked:
        logger.warning(
            "micro-batches hold %d tokens: there is no memory for the %d that were asked for",
            found,
            asked,
        )


def prove_chains(engine: Steppable) -> None:
    """Makes room for the steps of decode proofs, and holds a short chain, step by step, against
    one forward that follows it. What speaks against either is registered, and such proofs are
    refused.
    """
    info = engine.info
    if info.hidden_size < PICKED or info.no_chains:
        return
    n_tokens = engine.reserve_for_steps()
    engine.info = info = dataclasses.replace(info, kept_tokens=n_tokens)
    if n_tokens < info.kept_by_nonce(_CHAIN.seq_len + _CHAIN_STEPS):
        engine.info = dataclasses.replace(
            info,
            no_chains="There is no memory for the steps of decode proofs (--decode-memory-gb).",
        )
        return
    nonces = range(min(2, info.max_batch(_CHAIN.seq_len, _CHAIN_STEPS)))
    try:
        engine.watch(len(nonces), _CHAIN.seq_len)
        chains = engine.compute(_CHAIN, nonces)
        seen = engine.unwatch()
        enforced = {str(nonce): chain for nonce, chain in zip(nonces, chains, strict=True)}
        claimed = _CHAIN.model_copy(update={"options": {**_CHAIN.options, "enforced": enforced}})
        judged: list[Any] = engine.compute(claimed, nonces)
    except (EngineLostError, EngineMemoryError):
        raise
    except ProoflineError as error:
        _refuse_chains(engine, str(error))
        return
    if touched := [layer for rank in seen for layer in rank["touched"]]:
        _refuse_chains(engine, f"their steps write into chat's cache of layer {touched[0]}")
    elif any(one is None or one[1] > _NEAR_TIE for one in judged):
        _refuse_chains(engine, f"one forward does not follow the steps ({judged})")


def prove_graphs(engine: Recording) -> None:
    """Holds a short chain whose steps are recorded and replayed against one that is not; where
    they differ by a point, nothing is recorded with this model.
    """
    if engine.info.hidden_size < PICKED or engine.info.no_chains:
        return
    nonces = range(min(2, engine.info.max_batch(_CHAIN.seq_len, _CHAIN_STEPS)))
    chains = engine.compute(_CHAIN, nonces)
    engine.use_graphs(True)
    replayed = engine.compute(_CHAIN, nonces)
    found = engine.use_graphs(replayed == chains)
    if found["why_not"] or replayed != chains:
        why = found["why_not"] or f"replayed steps gave {replayed} for {chains}"
        logger.warning(
            "steps of decode proofs run without CUDA graphs with %s: %s", engine.info.name, why
        )
    else:
        logger.info("steps of decode proofs run as CUDA graphs")


def _refuse_chains(engine: Steppable, why: str) -> None:
    refusal = f"Decode proofs cannot be computed with {engine.info.name}: {why}"
    logger.warning("%s", refusal)
    engine.info = dataclasses.replace(engine.info, no_chains=refusal)


def described(engine: Engine) -> str:
    """What an operator may want to know of how proofs are computed with the model: one line."""
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


def _prove_first_layer(engine: Engine, spec: ProofSpec) -> None:
    while True:
        n = engine.info.max_batch(spec.seq_len)
        try:
            engine.tick(
                Tick(
                    [MicroBatch(spec, range(n), id=0)],
                    [Slice(0, 0, 1 if engine.sliceable else engine.stages[0].stop)],
                    wait=True,
                )
            )
            engine.tick(Tick(drop=[0]))
            return
        except EngineMemoryError:
            if n == 1:
                raise
            engine.info = dataclasses.replace(engine.info, max_batch_tokens=n // 2 * spec.seq_len)


def _spec(seq_len: int) -> ProofSpec:
    return ProofSpec(block_hash="warm-up", public_key="warm-up", seq_len=seq_len, options={})
