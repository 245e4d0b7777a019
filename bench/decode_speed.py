"""What decode proofs cost on one engine, beside vLLM's own generation, and what looking ahead saves a validator.

    python -m bench.decode_speed --model tiny-qwen3-256 --seq-len 32 --max-tokens 32      # anywhere
    python -m bench.decode_speed --dimensions qwen3-8b --batch 128 --batch 256 --decode-memory-gb 40   # on a GPU

Proofs and vLLM's `generate` run in turns on the same engine, with as many sequences and tokens each. Chat and Redis
are not there: one process, one engine.
"""

import json
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from bench import machine
from bench.report import console, exit_with, verdict
from cli.alone import dimensions as dummies
from cli.alone.local_engine import local_engine, stdout_kept_clean
from cli.model_choice import with_chosen_model
from poc_core.gpus import nvml
from poc_core.records import ProofSpec
from workers.engines.base import Engine
from workers.engines.options import EngineOptions

# Nonces that the network's nodes validate at a time by default.
USUAL_BATCH = 32
# Largest difference of a margin that both ways of judging may find.
SAME_MARGIN = {"bfloat16": 0.005, "float32": 1e-5}


def main(
    model: Annotated[str | None, typer.Option(help="A model that is there, with its weights.")] = None,
    dimensions: Annotated[
        str | None, typer.Option(help=f"Or one with dummy weights: {', '.join(dummies.DIMENSIONS)}.")
    ] = None,
    seq_len: Annotated[int, typer.Option(min=1, help="Positions of a nonce's prefill.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="Steps after it.")] = 256,
    batch: Annotated[list[int] | None, typer.Option(help="Nonces of a micro-batch; may be repeated.")] = None,
    judged: Annotated[int, typer.Option(min=1, help="Nonces of the validation.")] = 200,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    tensor_parallel: Annotated[int, typer.Option(min=1)] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1)] = 1,
    decode_memory_gb: Annotated[float | None, typer.Option(help="As of `proofline workers`.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Turns; their medians are compared.")] = 2,
    engine_arg: Annotated[list[str] | None, typer.Option(help="An argument of `vllm serve`, may be repeated.")] = None,
    target: Annotated[float, typer.Option(help="Least ratio of tokens/s to vLLM's own.")] = 0.9,
    validation_target: Annotated[float, typer.Option(help="Least times that one forward is faster.")] = 10.0,
) -> None:
    """Nonces/min of chains beside vLLM's own loop, and one forward against step by step. Exit 1: a target is missed."""
    if (model is None) == (dimensions is None):
        raise typer.BadParameter("give --model or --dimensions")

    def run() -> bool:
        with ExitStack() as exits:
            dummy = dimensions is not None
            directory = exits.enter_context(dummies.model_directory(dimensions)) if dimensions else str(model)
            options = EngineOptions(
                model=directory,
                dtype=dtype,
                tensor_parallel=tensor_parallel,
                pipeline_parallel=pipeline_parallel,
                decode_memory_gb=decode_memory_gb,
                vllm_args=(*(dummies.ENGINE_ARGS if dummy else ()), *(engine_arg or ())),
            )
            exits.enter_context(stdout_kept_clean())
            engine = exits.enter_context(local_engine(with_chosen_model(options)))
            return measure(engine, seq_len, max_tokens, batch or [32], judged, repeat, target, validation_target)

    exit_with(run)


def measure(
    engine: Engine,
    seq_len: int,
    max_tokens: int,
    batches: list[int],
    judged: int,
    repeat: int,
    target: float,
    validation_target: float,
) -> bool:
    info = engine.info
    console.print(f"{machine.describe()}; {info.name}, {info.dtype}, {info.kept_tokens} tokens kept", highlight=False)
    best = 0.0
    table = Table(title=f"Chains, seq_len {seq_len}, max_tokens {max_tokens}")
    for heading in ("nonces", "nonces/min", "tokens/s", "vLLM's own\ntokens/s", "ratio", "MiB taken"):
        table.add_column(heading, justify="right")
    for n in batches:
        room = info.max_batch(seq_len, max_tokens)
        if n > room:
            console.print(f"[yellow]{n} nonces have no room ({room} have); see --decode-memory-gb[/]")
            continue
        turns = [pair(engine, seq_len, max_tokens, n, index) for index in range(-1, repeat)][1:]
        proof_s, own_s = (statistics.median(side) for side in zip(*turns, strict=True))
        tokens = n * (seq_len + max_tokens)
        with memory_grown() as grown:
            chains(engine, seq_len, max_tokens, n, "flat")
        best = max(best, own_s / proof_s)
        row = (60 * n / proof_s, tokens / proof_s, tokens / own_s)
        table.add_row(f"{n}", *(f"{x:,.1f}" for x in row), f"{own_s / proof_s:.3f}", f"{grown()}")
        console.print(json.dumps({"nonces": n, "seconds": turns}), highlight=False)
    console.print(table)
    faster, off = validation(engine, seq_len, max_tokens, judged, repeat)
    passed = [
        verdict("tokens/s over vLLM's own, the best size", best, target),
        verdict(f"{judged} nonces judged in one forward, times as fast as in steps", faster, validation_target),
    ]
    limit = SAME_MARGIN.get(info.dtype, 0.005)
    console.print(f"margins of the two ways differ by at most {off:.2g}, allowed {limit:g}", highlight=False)
    return all(passed) and off <= limit


def pair(engine: Engine, seq_len: int, max_tokens: int, n: int, index: int) -> tuple[float, float]:
    """Seconds of a micro-batch of chains, and of vLLM's own generation of as many tokens."""
    proof_s = timed(lambda: chains(engine, seq_len, max_tokens, n, f"turn-{index}"))
    return proof_s, timed(lambda: generate(engine, seq_len, max_tokens, n))


def chains(engine: Engine, seq_len: int, max_tokens: int, n: int, block_hash: str) -> list[Any]:
    return engine.compute(spec_of(seq_len, max_tokens, block_hash), range(n))


def spec_of(seq_len: int, max_tokens: int, block_hash: str, **options: Any) -> ProofSpec:
    return ProofSpec(
        scheme="decode",
        block_hash=block_hash,
        public_key="bench",
        seq_len=seq_len,
        options={"max_tokens": max_tokens} | options,
    )


def generate(engine: Any, seq_len: int, max_tokens: int, n: int) -> None:
    """vLLM's own loop: as many prompts that it has never seen, all at once, greedy, to the last token."""
    import asyncio

    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    async def one(index: int) -> int:
        prompt = {
            "prompt_token_ids": [(index * 31 + place * 7) % 50 + 10 for place in range(seq_len)],
            "cache_salt": uuid.uuid4().hex,
        }
        last = [output async for output in engine._llm.generate(prompt, sampling, uuid.uuid4().hex)][-1]
        return len(last.outputs[0].token_ids)

    async def every() -> list[int]:
        return await asyncio.gather(*map(one, range(n)))

    counts = engine._await(every(), 600)
    assert counts == [max_tokens] * n, counts


def validation(engine: Engine, seq_len: int, max_tokens: int, n: int, repeat: int) -> tuple[float, float]:
    """(how many times one forward is as fast as steps of USUAL_BATCH nonces, largest difference of their margins).

    Claims of an honest node, but for every tenth nonce, whose first point is another.
    """
    claimed = chains(engine, seq_len, max_tokens, n, "claimed")
    for chain in claimed[::10]:
        chain[0] = (chain[0] + 1) % 16
    enforced = {str(nonce): chain for nonce, chain in enumerate(claimed)}
    at_once = spec_of(seq_len, max_tokens, "claimed", enforced=enforced)
    in_steps = spec_of(seq_len, max_tokens, "claimed", enforced=enforced, stepwise=True)

    def judge(spec: ProofSpec, batch: int) -> list[Any]:
        return [one for low in range(0, n, batch) for one in engine.compute(spec, range(n)[low : low + batch])]

    ways = {
        "in one forward": (at_once, n),
        f"step by step, {USUAL_BATCH} at a time": (in_steps, USUAL_BATCH),
        "step by step, as many as there is room for": (in_steps, n),
    }
    found = {way: judge(*how) for way, how in ways.items()}  # warms up too
    took = {way: statistics.median(timed(partial(judge, *how)) for _ in range(repeat)) for way, how in ways.items()}
    for way, seconds in took.items():
        console.print(f"{n} nonces judged {way}: {seconds:.2f} s", highlight=False)
    first, usual, _ = found.values()
    off = max(abs(one[1] - other[1]) for one, other in zip(first, usual, strict=True))
    one_forward, by_usual, _ = took.values()
    return by_usual / one_forward, off


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def memory_grown() -> Iterator[Callable[[], int]]:
    """MiB that all GPUs of this machine together have taken since."""
    before = used_mib()
    yield lambda: used_mib() - before


def used_mib() -> int:
    with nvml() as library:
        if library is None:
            return 0
        devices = (library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount()))
        return sum(int(library.nvmlDeviceGetMemoryInfo(device).used) for device in devices) >> 20


if __name__ == "__main__":
    typer.run(main)
