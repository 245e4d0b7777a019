"""How fast jobs are through API, Redis and Celery, compared with a bare loop on the same engine.

    .venv/bin/python -m bench.queue_overhead
    .venv/bin/python -m bench.queue_overhead --dimensions qwen3-8b      # on a GPU host

Both sides compute the same nonces in the same batches on the vLLM engine of one worker. The sides
take turns, so that changes of the machine's speed affect both.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer

from bench.harness import machine
from bench.harness.node import body_of, run_job, spec_of, values_of
from bench.harness.open_worker import OpenStack
from bench.harness.overhead import Pair, check_same, compare, open_node
from bench.harness.report import ChatPolicy, Model, QuietWait, Repeat, measures, run
from lab.measure import dimensions as dummies
from workers.engines.options import EngineKind, EngineOptions

WARM_UP_BATCHES = 4  # of each side, before its first timed run


@dataclass(frozen=True)
class Case:
    """A job of the benchmark and the least ratio of speeds; None for no target."""

    batch_size: int
    seq_len: int
    n_nonces: int
    target: float | None

    @property
    def title(self) -> str:
        return f"batch {self.batch_size}, seq_len {self.seq_len}, {self.n_nonces} nonces"


CASES = (Case(32, 256, 4096, 0.90), Case(8, 1024, 512, 0.96))
# About ten seconds each on an H200. At seq_len 64 a batch takes as little as 20 ms.
DUMMY_CASES = {
    "qwen3-0.6b": (Case(32, 1024, 3072, 0.95), Case(32, 64, 16384, None)),
    "qwen3-8b": (Case(32, 1024, 512, 0.95), Case(32, 64, 5120, None)),
}


@measures
def main(
    repeat: Repeat = 5,
    model: Model = "tiny-qwen3",
    engine: Annotated[EngineKind, typer.Option(help="vllm or transformers.")] = "vllm",
    dimensions: Annotated[
        str,
        typer.Option(
            help="Instead of --model dummy weights of these dimensions, in cases for a GPU:"
            f" {', '.join(DUMMY_CASES)}."
        ),
    ] = "",
    chat_policy: ChatPolicy = "off",
    quiet_wait: QuietWait = 60.0,
) -> bool:
    """Nonces/s of API, Redis and Celery over those of a bare loop on the same engine, in turns.

    Pairs of runs that other programs disturbed are repeated, at most twice. Exits with 1 when a
    case misses its target.
    """
    if dimensions and dimensions not in DUMMY_CASES:
        raise typer.BadParameter(f"one of {', '.join(DUMMY_CASES)}", param_hint="--dimensions")
    cases = DUMMY_CASES.get(dimensions, CASES)
    vllm_args = tuple(dummies.ENGINE_ARGS) if dimensions else ()
    with dummies.model_directory(dimensions) if dimensions else nullcontext(model) as chosen:
        options = EngineOptions(model=chosen, engine=engine, vllm_args=vllm_args)
        with open_node(options, chat_policy) as (stack, client):
            passed = [measure(one, stack, client, repeat, quiet_wait) for one in cases]
    return all(passed)


def measure(
    case: Case, stack: OpenStack, client: httpx.Client, repeat: int, quiet_wait_s: float
) -> bool:
    def sides(block_hash: str, n: int) -> dict[str, Callable[[], Any]]:
        spec = spec_of(case.seq_len, block_hash)
        work = {"nonces": list(range(n)), "batch_size": case.batch_size}
        body = body_of(stack.model_name, case.seq_len, block_hash, **work)
        return {
            "queue": lambda: run_job(client, body),
            "loop": lambda: stack.loop(spec, range(n), case.batch_size),
        }

    def pair(index: int) -> Pair:
        works = sides(f"block-{index}", case.n_nonces)
        # A B, B A, A B: a drift of the machine's speed favours neither side.
        order = list(works) if index % 2 == 0 else list(works)[::-1]
        found = {name: machine.measured(works[name], quiet_wait_s) for name in order}
        (queue_s, job), (loop_s, values) = found["queue"][0], found["loop"][0]
        check_same(values_of(job), values)
        others = max(usage.others for _, usage in found.values())
        return Pair(case.n_nonces, queue_s, loop_s, others)

    for work in sides("warm-up", WARM_UP_BATCHES * case.batch_size).values():
        work()
    return compare(f"Queue overhead: {case.title}", pair, repeat, case.target)


if __name__ == "__main__":
    run(main)
