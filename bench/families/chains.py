"""Decode proofs of each family's tiny model, here: steps against one forward, alone and together.

    python -m bench.families.chains [--jobs 4] [--variants bfloat16,fp8] [FAMILY ...]

A line a family: refused with a sentence, or every check. Each engine has a process of its own, and
a log in build/families. What is neither right nor refused is wrong: exit code 1.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from pydantic import JsonValue

from bench.families import against_oracle
from bench.families.checks import greedy
from bench.families.look import FOLDER, START_S, VARIANTS, options_of
from bench.families.matrix import in_a_process
from cli.machine.gpus import visible_gpus
from poc_core.errors import ProoflineError
from poc_core.records import PassOrder, ProofSpec
from poc_core.schemes.decode.limits import ChainLimits, why_no_chains
from poc_core.schemes.decode.options import passes_of
from workers.engines.ticks import MicroBatch, Slice, Tick
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan

FAMILIES = (
    "deepseek-v4",
    "glm-5.3-flash",
    "kimi-linear",
    "deepseek-v3.2",
    "glm-5",
    "qwen3-next",
    "qwen3.5",
    "deepseek-v3",
    "kimi-k2.6",
    "minimax-m2",
)
_NONCES = range(4)
# Over several blocks and windows.
SPEC = ProofSpec(
    scheme="decode",
    block_hash="block",
    public_key="key",
    seq_len=100,
    options={"max_tokens": 64},
)
# A variant of a GPU: chat's steps are vLLM's own CUDA graphs, whose metadata lies in buffers that
# proofs' steps fill too.
_GRAPHS = "graphs"
_CHATS_GRAPHS = (
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 8, 16]}',
)
# What honest nodes are granted; a chain of another state is off by 0.1 or more.
_MARGIN = 0.03
# Beside others: nonces that a micro-batch holds at a time.
_AMONG = range(8)
_FIRST_ID = 5_000_000
_OTHER = ProofSpec(block_hash="other", public_key="key", seq_len=64)


def look(family: str, variant: str, on_gpu: bool) -> dict[str, Any]:
    """What is seen of one family's chains."""
    from workers.load import load_engine

    graphs, variant = variant == _GRAPHS, "bfloat16" if variant == _GRAPHS else variant
    words = _CHATS_GRAPHS if graphs else ()
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
    """Every check of an engine that computes chains."""
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
    # Other sizes round otherwise on a GPU, and a chain leaves another at the first near tie.
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
    """Claims of the chains of the first nonces, as they are where more are computed at a time."""
    more: list[Any] = compute_all(engine, spec, _AMONG)
    return _claimed(spec, more[: len(chains)])


def _margin(engine: Any, spec: ProofSpec, nonces: Sequence[int]) -> float:
    """The largest margin of claims; infinite where there is none."""
    judged: list[Any] = compute_all(engine, spec, nonces)
    return max(float("inf") if one is None else float(one[1]) for one in judged)


def _same(seen: Sequence[Any], expected: Sequence[Any]) -> str:
    """In words; of a chain that leaves its own, from which step on."""
    for nonce, (one, other) in enumerate(zip(seen, expected, strict=True)):
        if one != other:
            pairs = zip(one or [], other, strict=False)
            step = next((step for step, (a, b) in enumerate(pairs) if a != b), 0)
            return f"DIFFERENT (nonce {nonce} from step {step} on)"
    return "same"


def _in_parts(engine: Any, spec: ProofSpec) -> list[JsonValue]:
    """With prefills of at most three nonces."""
    whole = engine.info
    engine.info = dataclasses.replace(whole, max_batch_tokens=3 * spec.seq_len)
    try:
        return compute_all(engine, spec, _NONCES)
    finally:
        engine.info = whole


def _replayed(engine: Any, spec: ProofSpec, chains: Sequence[Any]) -> str:
    """With steps recorded: what they give, twice, and how many graphs there were."""
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
    """Within, steps are recorded where they can be; gives what tells how many were."""
    before = engine.use_graphs(True)["recorded"]

    def tell() -> dict[str, Any]:
        found: dict[str, Any] = engine.use_graphs(True)
        return found | {"recorded": found["recorded"] - before}

    try:
        yield tell
    finally:
        engine.use_graphs(False)


def _beside_chat(engine: Any, spec: ProofSpec, chains: Sequence[Any]) -> dict[str, str]:
    """Chains between whose steps chat answers and other proofs run; the answers, from alone."""
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
    """Runs a micro-batch step by step: number and values, which come with the last."""
    for step in range(PassOrder(len(_NONCES), len(_NONCES), passes_of(spec)).n_passes):
        begin = [MicroBatch(spec, _NONCES, id=own)] if step == 0 else []
        one = Slice(own, 0, engine.info.n_layers, step, step + 1)
        yield step, engine.tick(Tick(begin, [one], wait=True)).values.get(own)


def main() -> None:
    on_gpu = bool(visible_gpus())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=FAMILIES)
    parser.add_argument("--variants", default="bfloat16", help=f"of {','.join(VARIANTS)},{_GRAPHS}")
    parser.add_argument("--jobs", type=int, default=4 if on_gpu else 1, help="engines at a time")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds of one engine")
    parser.add_argument("--one", action="store_true", help="in this process, as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(look(options.families[0], options.variants, on_gpu)), flush=True)
        return
    for family in options.families:
        with suppress(Exception):  # the family's own process tells what is wrong with it
            against_oracle.model(family, FOLDER)
    wrong = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {
            pool.submit(in_a_process, family, variant, options.limit, "chains"): (family, variant)
            for family in options.families
            for variant in options.variants.split(",")
        }
        for done in as_completed(waiting):
            family, variant = waiting[done]
            seen = done.result()
            words = ", ".join(f"{name} {value}" for name, value in seen.items() if name != "right")
            mark = "WRONG" if not seen["right"] else "refused" if "refused" in seen else "right"
            wrong += mark == "WRONG"
            print(f"{mark:7} {family:14} {variant:9} {words}", flush=True)
    print(f"{wrong} wrong of {len(waiting)}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
