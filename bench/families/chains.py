"""Decode proofs of each family's tiny model: steps compared with one forward, alone and together.

    python -m bench.families.chains [--jobs 4] [--variants bfloat16,graphs] [FAMILY ...]

See `bench.families.matrix`. The variant `graphs` is bfloat16 with vLLM's CUDA graphs for chat.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from pydantic import JsonValue

from bench.families import against_oracle
from bench.families.checks import greedy
from bench.families.look import FOLDER, START_S, options_of
from bench.families.matrix import parser_for, run
from cli.machine.gpus import visible_gpus
from poc_core.errors import ProoflineError
from poc_core.records import PassOrder, ProofSpec
from poc_core.schemes.decode.limits import ChainLimits, why_no_chains
from poc_core.schemes.decode.options import passes_of
from workers.engines.base import MicroBatch, Slice, Tick
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan

FAMILIES = (
    *("deepseek-v4", "glm-5.3-flash", "kimi-linear", "deepseek-v3.2", "glm-5", "qwen3-next"),
    *("qwen3.5", "deepseek-v3", "kimi-k2.6", "minimax-m2"),
)
_NONCES = range(4)
# Longer than the families' blocks and windows.
SPEC = ProofSpec(
    scheme="decode",
    block_hash="block",
    public_key="key",
    seq_len=100,
    options={"max_tokens": 64},
)
# A variant for GPUs: chat's steps are vLLM's CUDA graphs, whose metadata is in buffers that the
# steps of proofs fill too.
_GRAPHS = "graphs"
_CHATS_GRAPHS = (
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 8, 16]}',
)
# Largest margin of an honest node; the margin of a chain of another state is 0.1 or more.
_MARGIN = 0.03
# Nonces of a larger micro-batch.
_AMONG = range(8)
_FIRST_ID = 5_000_000
_OTHER = ProofSpec(block_hash="other", public_key="key", seq_len=64)


def look(family: str, variant: str, on_gpu: bool) -> dict[str, Any]:
    """Loads the family's engine and returns the result of every check, or the refusal."""
    from workers.load import load_engine

    words = _CHATS_GRAPHS if variant == _GRAPHS else ()
    variant = "bfloat16" if words else variant
    options = options_of(family, variant, on_gpu, wide=True, words=words)
    began = time.monotonic()
    try:
        engine: Any = load_engine(options, START_S)
    except ProoflineError as error:
        return {"right": "\n" not in str(error), "refused": str(error)}
    started = {"started": f"{time.monotonic() - began:.0f} s"}
    try:
        if why_not := why_no_chains(engine.info):
            return {"right": True, "refused": why_not, **started}
        return checked(engine, SPEC) | started
    finally:
        engine.close()


def checked(engine: Any, spec: ProofSpec) -> dict[str, Any]:
    """Returns the result of every check of an engine that computes chains."""
    engine.use_graphs(False)
    limits = ChainLimits.of(engine.info)
    seen: dict[str, Any] = {"kept_tokens": limits.kept_tokens, "kept_state": limits.kept_state}
    began = time.monotonic()
    chains: list[Any] = compute_all(engine, spec, _NONCES)
    seen["eager"] = f"{time.monotonic() - began:.2f} s"
    if None in chains:
        return {"right": False, "chains": "not finite", **seen}
    found = {
        "again": _same(compute_all(engine, spec, _NONCES), chains),
        "cut": _same(compute_all(engine, spec, _NONCES, SlicePlan(0.0, 1)), chains),
        "graphs": _replayed(engine, spec, chains),
    }
    margins = {
        "one forward": _margin(engine, _claimed(spec, chains), _NONCES),
        "stepwise": _margin(engine, _claimed(spec, chains, stepwise=True), _NONCES),
        "alone": max(
            _margin(engine, _claimed(spec, chains, stepwise=True), [nonce]) for nonce in _NONCES
        ),
        "among eight": _margin(engine, _among(engine, spec, chains), _NONCES),
    }
    others = [*chains[1:], chains[0]]
    seen["of other nonces"] = f"{_margin(engine, _claimed(spec, others), _NONCES):.3f}"
    beside = _beside_chat(engine, spec, chains)
    # A GPU rounds differently with other sizes, so chains part at the first near tie.
    full = limits.max_batch(spec, engine.info)
    for name, others in {
        "in parts": _in_parts(engine, spec),
        f"{full} at a time": compute_all(engine, spec, range(full)),
    }.items():
        if None in others:
            return {"right": False, name: "not finite", **seen}
        claimed = _claimed(spec, others[: len(chains)], stepwise=True)
        margins[name] = _margin(engine, claimed, _NONCES)
    right = all(margin <= _MARGIN for margin in margins.values())
    exact = all(word.startswith("same") for word in (*found.values(), *beside.values()))
    told = {name: f"{margin:.4f}" for name, margin in margins.items()}
    return {"right": right and exact, **found, **told, **beside, **seen}


def _claimed(spec: ProofSpec, chains: Sequence[Any], **options: JsonValue) -> ProofSpec:
    enforced: dict[str, JsonValue] = {str(i): chain for i, chain in enumerate(chains)}
    return spec.model_copy(update={"options": {**spec.options, **options, "enforced": enforced}})


def _among(engine: Any, spec: ProofSpec, chains: Sequence[Any]) -> ProofSpec:
    """Returns a spec with claims of the first nonces, computed in a larger micro-batch."""
    more: list[Any] = compute_all(engine, spec, _AMONG)
    return _claimed(spec, more[: len(chains)])


def _margin(engine: Any, spec: ProofSpec, nonces: Sequence[int]) -> float:
    """Returns the largest margin of the claims; inf if a nonce has no margin."""
    judged: list[Any] = compute_all(engine, spec, nonces)
    return max(float("inf") if one is None else float(one[1]) for one in judged)


def _same(seen: Sequence[Any], expected: Sequence[Any]) -> str:
    """Returns "same", or the first chain that differs and its first different step."""
    for nonce, (one, other) in enumerate(zip(seen, expected, strict=True)):
        if one != other:
            pairs = zip(one or [], other, strict=False)
            step = next((step for step, (a, b) in enumerate(pairs) if a != b), 0)
            return f"DIFFERENT (nonce {nonce} from step {step} on)"
    return "same"


def _in_parts(engine: Any, spec: ProofSpec) -> list[JsonValue]:
    """Computes the chains with prefills of at most three nonces."""
    whole = engine.info
    engine.info = dataclasses.replace(whole, max_batch_tokens=3 * spec.seq_len)
    try:
        return compute_all(engine, spec, _NONCES)
    finally:
        engine.info = whole


def _replayed(engine: Any, spec: ProofSpec, chains: Sequence[Any]) -> str:
    """Compares two runs with CUDA graphs; returns the result and the number of graphs."""
    with _graphs(engine) as tell:
        seen: list[JsonValue] = []
        for _ in range(2):
            began = time.monotonic()
            seen = compute_all(engine, spec, _NONCES)
            took = time.monotonic() - began
            if (word := _same(seen, chains)) != "same":
                return word
        told = tell()
    return f"same ({told['why_not'] or f'{took:.2f} s'}, {told['recorded']} recorded)"


@contextmanager
def _graphs(engine: Any) -> Iterator[Any]:
    """Records steps as CUDA graphs if possible; yields a function that returns their number."""
    before = engine.use_graphs(True)["recorded"]

    def tell() -> dict[str, Any]:
        found: dict[str, Any] = engine.use_graphs(True)
        return found | {"recorded": found["recorded"] - before}

    try:
        yield tell
    finally:
        engine.use_graphs(False)


def _beside_chat(engine: Any, spec: ProofSpec, chains: Sequence[Any]) -> dict[str, str]:
    """Compares chains, and chat between their steps, with those computed alone."""
    alone = greedy(engine)
    found = {}
    for graphs in (False, True):
        answers, values = [], []
        with _graphs(engine) if graphs else nullcontext():
            for step, value in _step_by_step(engine, spec, _FIRST_ID + graphs):
                values += [] if value is None else [value]
                if step % 16 == 0:
                    answers.append(greedy(engine))
                    compute_all(engine, _OTHER, _NONCES)
        name = "replayed beside chat" if graphs else "beside chat"
        found[name] = _same(values[-1], chains) if values else "DIFFERENT (no value)"
        if any(answer != alone for answer in answers):
            found[name] = "DIFFERENT (chat)"
    return found


def _step_by_step(
    engine: Any, spec: ProofSpec, own: int
) -> Iterator[tuple[int, Sequence[JsonValue] | None]]:
    """Runs a micro-batch step by step; yields each step and, with the last, the values."""
    for step in range(PassOrder(len(_NONCES), len(_NONCES), passes_of(spec)).n_passes):
        begin = [MicroBatch(spec, _NONCES, id=own)] if step == 0 else []
        one = Slice(own, 0, engine.info.n_layers, step, step + 1)
        yield step, engine.tick(Tick(begin, [one], wait=True)).values.get(own)


def main() -> None:
    given = parser_for(__doc__, "chains.json", "bfloat16", 170.0).parse_args()
    families = given.families or FAMILIES
    if given.one:
        print(json.dumps(look(families[0], given.variants, bool(visible_gpus()))), flush=True)
        return
    pairs = [(family, variant) for family in families for variant in given.variants.split(",")]
    run(pairs, given, "chains", lambda family: against_oracle.model(family, FOLDER))


if __name__ == "__main__":
    main()
