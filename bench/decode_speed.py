"""Cost of decode proofs compared with vLLM's own generation, and speed of their validation.

    python -m bench.decode_speed --model tiny-qwen3-256 --seq-len 32 --max-tokens 32  # anywhere
    python -m bench.decode_speed --dimensions qwen3-8b --batch 128 --batch 256 --decode-memory-gb 40
    python -m bench.decode_speed ... --graphs both --part chains  # with and without CUDA graphs

Proofs and vLLM's `generate` take turns on one engine in this process, with as many sequences and
tokens each; there is no chat and no Redis. Large dimensions need a GPU.
"""

import asyncio
import random
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer

from bench.harness import machine
from bench.harness.engine import engine_of, takes_engine
from bench.harness.report import Repeat, at_least, console, measures, run, say, say_json, table
from poc_core.records import ProofSpec
from poc_core.schemes.decode.contract import CONTRACT
from poc_core.schemes.decode.limits import ChainLimits
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.pipeline import compute_all

# Nonces that the network's nodes validate at a time by default.
USUAL_BATCH = 32
# Steps of the runs that warm up, if their number does not matter.
WARM_STEPS = 4
# Least ratio of tokens/s to vLLM's own, and of the speed of one forward to that of steps.
TARGET, VALIDATION_TARGET = 0.9, 10.0
# Largest difference between the margins of one forward and of steps.
SAME_MARGIN = {"bfloat16": 0.005, "float32": 1e-5}


class Part(StrEnum):
    VALIDATION = "validation"
    CHAINS = "chains"


class Graphs(StrEnum):
    OFF = "off"
    ON = "on"
    BOTH = "both"


@takes_engine()
@measures
def main(
    *,
    engine_options: EngineOptions,
    seq_len: Annotated[int, typer.Option(min=1, help="Positions of a nonce's prefill.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="Steps after it.")] = 256,
    batch: Annotated[
        list[int] | None, typer.Option(help="Nonces of a micro-batch; may be repeated.")
    ] = None,
    judged: Annotated[int, typer.Option(min=1, help="Nonces of the validation.")] = 200,
    repeat: Repeat = 2,
    part: Annotated[
        list[Part] | None,
        typer.Option(help="What is measured. By default validation and chains."),
    ] = None,
    graphs: Annotated[
        Graphs, typer.Option(help="Steps as CUDA graphs, without, or both in turns.")
    ] = Graphs.OFF,
) -> bool:
    """Nonces/min of chains and of vLLM's own loop, one forward and steps. Exit 1: too slow."""
    ways = {Graphs.OFF: [False], Graphs.ON: [True], Graphs.BOTH: [False, True]}[graphs]
    with engine_of(engine_options) as engine:
        say(f"{ChainLimits.of(engine.info).kept_tokens} tokens kept")
        passed, parts = True, part or list(Part)
        if Part.VALIDATION in parts:
            passed &= validation(engine, seq_len, max_tokens, judged, repeat, ways)
        if Part.CHAINS in parts:
            passed &= best_of(engine, seq_len, max_tokens, batch or [32], repeat, ways)
    return passed


def best_of(
    engine: Engine, seq_len: int, max_tokens: int, batches: list[int], repeat: int, ways: list[bool]
) -> bool:
    """Measures chains in several batch sizes, in turns with vLLM's own generation.

    `ways`: with CUDA graphs, without, or both.
    """
    rows = table(
        f"Chains, seq_len {seq_len}, max_tokens {max_tokens}",
        *("nonces", "steps", "nonces/min", "tokens/s", "vLLM's own\ntokens/s", "ratio", "MiB more"),
    )
    best, warm = 0.0, min(max_tokens, WARM_STEPS)
    for n in batches:
        room = CONTRACT.max_batch(spec_of(seq_len, max_tokens, ""), engine.info)
        if n > room:
            say(f"[yellow]{n} nonces have no room ({room} have); see --decode-memory-gb[/]")
            continue
        for on in ways:
            use_graphs(engine, on)
            chains(engine, seq_len, warm, n, "warm-up")
        prompts = random_prompts(engine, seq_len, n)
        generate(engine, prompts, warm)
        took: dict[bool, list[float]] = defaultdict(list)
        mib: dict[bool, int] = defaultdict(int)
        own_s = []
        # The first turn warms up too, because graphs are recorded by length. Its memory counts.
        for index in range(repeat + 1):
            for on in ways:
                use_graphs(engine, on)
                before, began = machine.gpu_mib(), time.perf_counter()
                chains(engine, seq_len, max_tokens, n, f"turn-{index}")
                seconds = time.perf_counter() - began
                mib[on] = max(mib[on], machine.gpu_mib() - before)
                if index:
                    took[on].append(seconds)
                    say_json(nonces=n, steps=_name(on), seconds=seconds)
            own = generate(engine, prompts, max_tokens)
            if index:
                own_s.append(own.seconds)
                say_json(nonces=n, steps="vLLM's own", **own._asdict())
        tokens, of_own = n * (seq_len + max_tokens), statistics.median(own_s)
        for on in ways:
            proof_s = statistics.median(took[on])
            ratio = of_own / proof_s
            best = max(best, ratio)
            figures = (60 * n / proof_s, tokens / proof_s, tokens / of_own)
            shown = [f"{figure:,.1f}" for figure in figures]
            rows.add_row(f"{n}", _name(on), *shown, f"{ratio:.3f}", f"{mib[on]}")
            names = ("nonces_per_min", "tokens_per_s", "own")
            rates = dict(zip(names, figures, strict=True))
            say_json(nonces=n, steps=_name(on), ratio=ratio, **rates)
    console.print(rows)
    return at_least("tokens/s over vLLM's own, the best size", best, TARGET)


def use_graphs(engine: Any, on: bool) -> None:
    """Turns CUDA graphs of steps on or off; prints why there are none."""
    if hasattr(engine, "use_graphs"):
        found = engine.use_graphs(on)
        if on and found["why_not"]:
            say(f"[yellow]without CUDA graphs: {found['why_not']}[/]")


def _name(graphs: bool) -> str:
    return "graphs" if graphs else "eager"


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
    # Mean number of different tokens per step. Sequences with the same token choose the same
    # experts, whose weights are then read once.
    differing_tokens: float


def generate(engine: Any, prompts: list[list[int]], max_tokens: int) -> Generation:
    """Runs vLLM's own loop on all prompts at once, greedy, to the last token, without caches."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )

    async def one(token_ids: list[int]) -> list[int]:
        prompt = {"prompt_token_ids": token_ids, "cache_salt": uuid.uuid4().hex}
        outputs = engine._llm.generate(prompt, sampling, uuid.uuid4().hex)
        last = [output async for output in outputs][-1]
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
    """Returns prompts of random tokens, which differ as those of different users do."""
    vocabulary = range(engine._llm.model_config.get_vocab_size())
    drawn = random.Random(n)
    return [drawn.choices(vocabulary, k=seq_len) for _ in range(n)]


def validation(
    engine: Engine, seq_len: int, max_tokens: int, n: int, repeat: int, ways: list[bool]
) -> bool:
    """Compares the time and the margins of one forward with those of steps.

    The claims are an honest node's, except every tenth nonce, which has another first point.
    `ways`: steps with CUDA graphs, without, or both; the target is for the first of them.
    """
    use_graphs(engine, ways[-1])
    claimed = chains(engine, seq_len, max_tokens, n, "claimed")
    for chain in claimed[::10]:
        chain[0] = (chain[0] + 1) % 16

    def judge(length: int, batch: int, **options: Any) -> list[Any]:
        enforced = {str(nonce): chain[: length + 1] for nonce, chain in enumerate(claimed)}
        spec = spec_of(seq_len, length, "claimed", enforced=enforced, **options)
        parts = (range(n)[low : low + batch] for low in range(0, n, batch))
        return [one for part in parts for one in compute_all(engine, spec, part)]

    def measure(way: str, length: int, batch: int, **options: Any) -> tuple[float, list[Any]]:
        judge(length, batch, **options)  # warms up
        values: list[Any] = []
        seconds = [
            timed(lambda: values.append(judge(max_tokens, batch, **options))) for _ in range(repeat)
        ]
        took_s = statistics.median(seconds)
        say(f"{n} nonces judged {way}: {took_s:.2f} s")
        return took_s, values[-1]

    # One forward warms up with the timed length, because its kernels are chosen by its size. So do
    # steps with CUDA graphs, which are recorded by length.
    use_graphs(engine, False)
    once_s, at_once = measure("in one forward", max_tokens, n)
    stepped = []
    for on in ways:
        use_graphs(engine, on)
        warm = max_tokens if on else min(max_tokens, WARM_STEPS)
        for how, batch in ((f"{USUAL_BATCH} at a time", USUAL_BATCH), ("as many as fit", n)):
            way = f"step by step ({_name(on)}), {how}"
            stepped.append(measure(way, warm, batch, stepwise=True))
    usual_s, usual = stepped[0]
    off = max(abs(one[1] - other[1]) for one, other in zip(at_once, usual, strict=True))
    limit = SAME_MARGIN.get(engine.info.dtype, 0.005)
    say(f"margins of the two ways differ by at most {off:.2g}, allowed {limit:g}")
    what = f"{n} nonces judged in one forward, times as fast as in steps ({_name(ways[0])})"
    return at_least(what, usual_s / once_s, VALIDATION_TARGET, ".2f") and off <= limit


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    run(main)
