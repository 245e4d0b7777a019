"""Cost of decode proofs beside vLLM's own generation, and what looking ahead saves a validator.

    python -m bench.decode_speed --model tiny-qwen3-256 --seq-len 32 --max-tokens 32  # anywhere
    python -m bench.decode_speed --dimensions qwen3-8b --batch 128 --batch 256 --decode-memory-gb 40
    python -m bench.decode_speed ... --graphs both --part chains  # with and without CUDA graphs
    python -m bench.decode_speed ... --part artifacts --part chains  # one start of a slow engine

Every figure is printed as soon as it is there, the validator's first. Proofs and vLLM's `generate`
run in turns on the same engine, with as many sequences and tokens each. Chat and Redis are not
there: one process, one engine. Large dimensions need a GPU.
"""

import json
import random
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from bench.harness import machine
from bench.harness.engine import engine_of, takes_engine
from bench.harness.report import console, exit_with, run, verdict
from lab.measure.speed import spec_of as artifact_spec
from lab.measure.speed import speed
from poc_core.records import ProofSpec
from poc_core.schemes.decode.contract import CONTRACT
from poc_core.schemes.decode.limits import ChainLimits
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.pipeline import compute_all

# Nonces that the network's nodes validate at a time by default.
USUAL_BATCH = 32
# Steps of the runs that warm up.
WARM_STEPS = 4
# Seconds that artifacts are computed.
ARTIFACT_S = 4.0
# Least ratio of tokens/s to vLLM's own, and times that one forward is faster than steps.
TARGET, VALIDATION_TARGET = 0.9, 10.0
# Largest difference of a margin that both ways of judging may find.
SAME_MARGIN = {"bfloat16": 0.005, "float32": 1e-5}


class Part(StrEnum):
    ARTIFACTS = "artifacts"
    VALIDATION = "validation"
    CHAINS = "chains"


class Graphs(StrEnum):
    OFF = "off"
    ON = "on"
    BOTH = "both"


@takes_engine()
def main(
    *,
    engine_options: EngineOptions,
    seq_len: Annotated[int, typer.Option(min=1, help="Positions of a nonce's prefill.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="Steps after it.")] = 256,
    batch: Annotated[
        list[int] | None, typer.Option(help="Nonces of a micro-batch; may be repeated.")
    ] = None,
    judged: Annotated[int, typer.Option(min=1, help="Nonces of the validation.")] = 200,
    repeat: Annotated[int, typer.Option(min=1, help="Turns; their medians are compared.")] = 2,
    part: Annotated[
        list[Part] | None,
        typer.Option(help="What is measured. By default validation and chains."),
    ] = None,
    graphs: Annotated[
        Graphs, typer.Option(help="Steps as CUDA graphs, without, or both in turns.")
    ] = Graphs.OFF,
) -> None:
    """Nonces/min of chains beside vLLM's own loop, one forward beside steps. Exit 1: too slow."""
    ways = {Graphs.OFF: [False], Graphs.ON: [True], Graphs.BOTH: [False, True]}[graphs]

    def measure() -> bool:
        with engine_of(engine_options) as engine:
            kept = ChainLimits.of(engine.info).kept_tokens
            console.print(f"{kept} tokens kept", highlight=False)
            passed, parts = True, part or [Part.VALIDATION, Part.CHAINS]
            if Part.ARTIFACTS in parts:
                artifacts(engine, seq_len)
            if Part.VALIDATION in parts:
                passed &= validation(engine, seq_len, max_tokens, judged, repeat, ways)
            if Part.CHAINS in parts:
                passed &= best_of(engine, seq_len, max_tokens, batch or [32], repeat, ways)
            return passed

    exit_with(measure)


def artifacts(engine: Engine, seq_len: int) -> None:
    """Prints the rate of the proofs that are a prefill alone, in whole micro-batches."""
    n = min(USUAL_BATCH, engine.info.max_batch(seq_len))
    found = speed(engine, artifact_spec(seq_len), n, None, ARTIFACT_S)
    _tell(n, artifacts_per_s=found.nonces_per_s, artifacts_per_min=60 * found.nonces_per_s)


def best_of(
    engine: Engine,
    seq_len: int,
    max_tokens: int,
    batches: list[int],
    repeat: int,
    ways: list[bool],
) -> bool:
    """Chains of micro-batches of several sizes, in turns with vLLM's own generation.

    `ways`: with graphs or not.
    """
    table = Table(title=f"Chains, seq_len {seq_len}, max_tokens {max_tokens}")
    for heading in (
        "nonces",
        "steps",
        "nonces/min",
        "tokens/s",
        "vLLM's own\ntokens/s",
        "ratio",
        "MiB taken",
    ):
        table.add_column(heading, justify="right")
    best = 0.0
    for n in batches:
        room = CONTRACT.max_batch(spec_of(seq_len, max_tokens, ""), engine.info)
        if n > room:
            console.print(
                f"[yellow]{n} nonces have no room ({room} have); see --decode-memory-gb[/]"
            )
            continue
        for on in ways:
            use_graphs(engine, on)
            chains(engine, seq_len, min(max_tokens, WARM_STEPS), n, "warm-up")
        prompts = random_prompts(engine, seq_len, n)
        generate(engine, prompts, min(max_tokens, WARM_STEPS))
        took: dict[str, list[float]] = {}
        grown: dict[str, int] = {}
        for index in range(repeat):
            for on in ways:
                use_graphs(engine, on)
                with memory_grown() as mib:
                    seconds = timed(
                        partial(chains, engine, seq_len, max_tokens, n, f"turn-{index}")
                    )
                grown[_said(on)] = max(mib(), grown.get(_said(on), 0))
                took.setdefault(_said(on), []).append(seconds)
                _tell(n, steps=_said(on), seconds=seconds)
            own = generate(engine, prompts, max_tokens)
            took.setdefault("own", []).append(own.seconds)
            _tell(n, steps="vLLM's own", **own._asdict())
        tokens, own_s = n * (seq_len + max_tokens), statistics.median(took.pop("own"))
        for way, seconds_of in took.items():
            proof_s = statistics.median(seconds_of)
            best = max(best, own_s / proof_s)
            figures = (60 * n / proof_s, tokens / proof_s, tokens / own_s)
            table.add_row(
                f"{n}",
                way,
                *(f"{x:,.1f}" for x in figures),
                f"{own_s / proof_s:.3f}",
                f"{grown[way]}",
            )
            _tell(
                n,
                steps=way,
                nonces_per_min=figures[0],
                tokens_per_s=figures[1],
                own=figures[2],
                ratio=own_s / proof_s,
            )
    console.print(table)
    return verdict("tokens/s over vLLM's own, the best size", best, TARGET)


def use_graphs(engine: Any, on: bool) -> None:
    """Turns recorded steps on or off; says why not, where steps are not recorded."""
    if not hasattr(engine, "use_graphs"):
        return
    found = engine.use_graphs(on)
    if on and found["why_not"]:
        console.print(f"[yellow]without CUDA graphs: {found['why_not']}[/]", highlight=False)


def _said(on: bool) -> str:
    return "graphs" if on else "eager"


def _tell(n: int, **figures: Any) -> None:
    """Prints one line of JSON."""
    plain = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in figures.items()
    }
    console.print(json.dumps({"nonces": n} | plain), highlight=False, soft_wrap=True)


def chains(engine: Engine, seq_len: int, max_tokens: int, n: int, block_hash: str) -> list[Any]:
    return compute_all(engine, spec_of(seq_len, max_tokens, block_hash), range(n))


def spec_of(seq_len: int, max_tokens: int, block_hash: str, **options: Any) -> ProofSpec:
    return ProofSpec(
        scheme="decode",
        block_hash=block_hash,
        public_key="bench",
        seq_len=seq_len,
        options={"max_tokens": max_tokens} | options,
    )


class Generation(NamedTuple):
    """A run of vLLM's own loop."""

    seconds: float
    # Of the tokens of a step, on average: sequences that have the same one choose the same experts,
    # whose weights are read once then.
    differing_tokens: float


def generate(engine: Any, prompts: list[list[int]], max_tokens: int) -> Generation:
    """Runs vLLM's own loop on all prompts at once, greedy, to the last token, none from a cache."""
    import asyncio

    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )

    async def one(token_ids: list[int]) -> list[int]:
        prompt = {"prompt_token_ids": token_ids, "cache_salt": uuid.uuid4().hex}
        last = [
            output async for output in engine._llm.generate(prompt, sampling, uuid.uuid4().hex)
        ][-1]
        return list(last.outputs[0].token_ids)

    async def every() -> list[list[int]]:
        return await asyncio.gather(*map(one, prompts))

    began = time.perf_counter()
    found = engine._await(every(), 600)
    took_s = time.perf_counter() - began
    steps = [set(tokens) for tokens in zip(*found, strict=True)]
    assert len(steps) == max_tokens, len(steps)
    return Generation(took_s, statistics.mean(map(len, steps)))


def random_prompts(engine: Any, seq_len: int, n: int) -> list[list[int]]:
    """Prompts of random tokens: sequences differ, as those of different users do."""
    vocabulary = range(engine._llm.model_config.get_vocab_size())
    drawn = random.Random(n)
    return [drawn.choices(vocabulary, k=seq_len) for _ in range(n)]


def validation(
    engine: Engine,
    seq_len: int,
    max_tokens: int,
    n: int,
    repeat: int,
    ways: list[bool],
) -> bool:
    """How much faster one forward is than steps of USUAL_BATCH nonces, and how margins differ.

    Claims of an honest node, but for every tenth nonce, whose first point is another. `ways`: steps
    with graphs or not; the first one's are what is compared.
    """
    use_graphs(engine, ways[-1])
    claimed = chains(engine, seq_len, max_tokens, n, "claimed")
    for chain in claimed[::10]:
        chain[0] = (chain[0] + 1) % 16

    def spec(length: int, **options: Any) -> ProofSpec:
        enforced = {str(nonce): chain[: length + 1] for nonce, chain in enumerate(claimed)}
        return spec_of(seq_len, length, "claimed", enforced=enforced, **options)

    def judge(judged: ProofSpec, batch: int) -> list[Any]:
        return [
            one
            for low in range(0, n, batch)
            for one in compute_all(engine, judged, range(n)[low : low + batch])
        ]

    stepwise = {"stepwise": True}
    turns: list[tuple[str, dict[str, Any], int, bool]] = [("in one forward", {}, n, False)]
    for on in ways:
        turns.append(
            (f"step by step ({_said(on)}), {USUAL_BATCH} at a time", stepwise, USUAL_BATCH, on)
        )
        turns.append((f"step by step ({_said(on)}), as many as there is room for", stepwise, n, on))
    found, took = [], []
    for way, options, batch, on in turns:
        use_graphs(engine, on)
        # One forward's warm-up is as long as what is timed: its kernels are chosen by its size.
        judge(spec(min(max_tokens, WARM_STEPS) if options else max_tokens, **options), batch)
        for _ in range(repeat):
            began = time.perf_counter()
            values = judge(spec(max_tokens, **options), batch)
            took.append(time.perf_counter() - began)
        took[-repeat:] = [statistics.median(took[-repeat:])]
        found.append(values)
        console.print(f"{n} nonces judged {way}: {took[-1]:.2f} s", highlight=False)
    at_once, usual, *_ = found
    off = max(abs(one[1] - other[1]) for one, other in zip(at_once, usual, strict=True))
    limit = SAME_MARGIN.get(engine.info.dtype, 0.005)
    console.print(
        f"margins of the two ways differ by at most {off:.2g}, allowed {limit:g}", highlight=False
    )
    what = (
        f"{n} nonces judged in one forward, times as fast as in steps of {USUAL_BATCH}"
        f" ({_said(ways[0])})"
    )
    return verdict(what, took[1] / took[0], VALIDATION_TARGET) and off <= limit


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def memory_grown() -> Iterator[Callable[[], int]]:
    """MiB that the GPUs this process may use have taken since."""
    before = machine.gpu_mib()
    yield lambda: machine.gpu_mib() - before


if __name__ == "__main__":
    run(main)
