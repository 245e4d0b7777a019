"""How much of a bare engine's speed is left behind API, Redis and Celery.

    .venv/bin/python bench/queue_overhead.py
    .venv/bin/python bench/queue_overhead.py --dimensions qwen3-8b      # on a GPU host

Both sides run the same nonces in the same batches on one and the same engine, real vLLM in a
worker. They take turns, so that whatever else changes on the machine meets both.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated

import httpx
import typer
from rich.table import Table

from bench.harness import machine
from bench.harness.open_worker import CHAT_POLICY_HELP, OpenStack
from bench.harness.report import LEGEND, console, exit_with, verdict, warn_of_noise
from bench.harness.timed_job import TIMEOUT_S, body_of, run_job
from lab.measure import dimensions as dummies
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.terms import StatTest
from poc_core.schemes.artifact.verdict import compare
from workers.engines.kinds import EngineKind
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 600.0  # the first start compiles kernels
K_DIM = 12
WARM_UP_BATCHES = 4  # of each side, before its first timed run

# Workers split batches so that chat need not wait, the loop does not: in bfloat16 that may show.
# Nearly all vectors must agree within this L2 distance.
SAME_WITHIN = 0.05
DIFFERING_SHARE = 0.01


@dataclass(frozen=True)
class Case:
    """A job of the benchmark and the least ratio of speeds; None: any."""

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


@dataclass(frozen=True)
class Run:
    """One side, timed."""

    seconds: float
    values: dict[int, str]  # vector_b64 by nonce
    usage: machine.Usage


@dataclass(frozen=True)
class Pair:
    """One run of each side."""

    queue: Run
    loop: Run

    @property
    def ratio(self) -> float:
        return self.loop.seconds / self.queue.seconds


class MismatchError(ProoflineError):
    """The two sides did not do the same work."""


@dataclass(frozen=True)
class Sides:
    """The ways to the engine; only one of them is used at a time."""

    stack: OpenStack
    client: httpx.Client
    quiet_wait_s: float

    def queue(self, case: Case, block_hash: str, n_nonces: int) -> Run:
        def work() -> tuple[float, dict[int, str]]:
            body = body_of(
                spec_of(case, block_hash), self.stack.model_name, range(n_nonces), case.batch_size
            )
            job = run_job(self.client, body)
            return job.seconds, {
                artifact["nonce"]: artifact["vector_b64"] for artifact in job.artifacts
            }

        return self._observed(work)

    def loop(self, case: Case, block_hash: str, n_nonces: int) -> Run:
        def work() -> tuple[float, dict[int, str]]:
            seconds, values = self.stack.loop(
                spec_of(case, block_hash), range(n_nonces), case.batch_size
            )
            return seconds, {nonce: str(value) for nonce, value in enumerate(values)}

        return self._observed(work)

    def pair(self, case: Case, index: int) -> Pair:
        # A B, B A, A B: a drift of the machine's speed favours neither.
        sides = (self.queue, self.loop) if index % 2 == 0 else (self.loop, self.queue)
        first, second = (side(case, f"block-{index}", case.n_nonces) for side in sides)
        compared = compare(first.values, second.values, K_DIM, StatTest(dist_threshold=SAME_WITHIN))
        if compared.n_mismatch > DIFFERING_SHARE * case.n_nonces:
            raise MismatchError(
                "The queue's artifacts are not those of the bare loop; their speeds do not compare."
            )
        return Pair(first, second) if index % 2 == 0 else Pair(second, first)

    def _observed(self, work: Callable[[], tuple[float, dict[int, str]]]) -> Run:
        machine.wait_until_quiet(self.quiet_wait_s)
        meter = machine.UsageMeter()
        seconds, values = work()
        return Run(seconds, values, meter.read())


def main(
    repeat: Annotated[
        int, typer.Option(min=1, help="Pairs of runs that count; their medians are compared.")
    ] = 5,
    model: Annotated[
        str, typer.Option(help="A shipped model, a directory or a name on the hub.")
    ] = "tiny-qwen3",
    engine: Annotated[EngineKind, typer.Option(help="vllm or transformers.")] = "vllm",
    dimensions: Annotated[
        str,
        typer.Option(
            help=(
                "Instead of --model dummy weights of these dimensions, in cases for a GPU:"
                f" {', '.join(DUMMY_CASES)}."
            )
        ),
    ] = "",
    case: Annotated[
        int, typer.Option(min=0, max=len(CASES), help="Only this case, counted from 1; 0: all.")
    ] = 0,
    chat_policy: Annotated[str, typer.Option(help=CHAT_POLICY_HELP)] = "off",
    quiet_wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait before each run until other programs are quiet."),
    ] = 60.0,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="An argument of `vllm serve`, may be repeated.")
    ] = None,
) -> None:
    """Nonces/s of API, Redis and Celery over those of a bare loop on the same engine, in turns.

    Pairs of runs that other programs disturbed are repeated, at most twice. Exits with 1 when a
    case misses its target.
    """
    if dimensions and dimensions not in DUMMY_CASES:
        raise typer.BadParameter(f"one of {', '.join(DUMMY_CASES)}", param_hint="--dimensions")
    cases: Sequence[Case] = DUMMY_CASES.get(dimensions, CASES)
    if case:
        cases = cases[case - 1 : case]
    vllm_args = (*(dummies.ENGINE_ARGS if dimensions else ()), *(engine_arg or ()))
    with dummies.model_directory(dimensions) if dimensions else nullcontext(model) as chosen:
        options = EngineOptions(model=chosen, engine=engine, vllm_args=vllm_args)
        exit_with(lambda: measure(cases, repeat, options, chat_policy, quiet_wait))


def measure(
    cases: Sequence[Case],
    repeat: int,
    options: EngineOptions,
    chat_policy: str,
    quiet_wait_s: float,
) -> bool:
    """Prints a table per case; True when all reach their targets."""
    env = {"POC_CHAT_POLICY": chat_policy}
    with OpenStack(options, max_fast_crashes=0, env=env) as stack:
        console.print(
            f"{machine.describe()}; engine {options.engine}, model {stack.model_name}, chat policy"
            f" {chat_policy}",
            highlight=False,
        )
        stack.wait_ready(READY_TIMEOUT_S)
        with httpx.Client(base_url=stack.base_url, timeout=TIMEOUT_S, trust_env=False) as client:
            sides = Sides(stack, client, quiet_wait_s)
            passed = [measure_case(case, sides, repeat) for case in cases]
    return all(passed)


def measure_case(case: Case, sides: Sides, repeat: int) -> bool:
    for side in (sides.queue, sides.loop):
        side(case, "warm-up", WARM_UP_BATCHES * case.batch_size)

    def measure_pair(index: int) -> tuple[Pair, float]:
        pair = sides.pair(case, index)
        return pair, max(pair.queue.usage.others, pair.loop.usage.others)

    return report(case, machine.repeated(measure_pair, repeat))


def report(case: Case, pairs: list[machine.Observed[Pair]]) -> bool:
    table = Table(title=f"Queue overhead: {case.title}")
    for heading in ("run", "queue\nnonces/s", "bare loop\nnonces/s", "ratio"):
        table.add_column(heading, justify="right")
    for heading in ("others\ncores", "load\naverage"):
        table.add_column(heading, justify="right", style="dim")
    for index, observed in enumerate(pairs, start=1):
        queue, loop = observed.result.queue, observed.result.loop
        table.add_row(
            f"{index}" if observed.counts else f"({index})",
            f"{case.n_nonces / queue.seconds:.1f}",
            f"{case.n_nonces / loop.seconds:.1f}",
            f"{observed.result.ratio:.3f}",
            f"{queue.usage.others:.2f} {loop.usage.others:.2f}",
            f"{queue.usage.load_before:.1f} {loop.usage.load_before:.1f}",
            style=None if observed.counts else "dim",
        )
    counted = [observed.result for observed in pairs if observed.counts]
    queue_s = statistics.median(pair.queue.seconds for pair in counted)
    loop_s = statistics.median(pair.loop.seconds for pair in counted)
    ratio = loop_s / queue_s
    table.add_section()
    table.add_row(
        "median",
        f"{case.n_nonces / queue_s:.1f}",
        f"{case.n_nonces / loop_s:.1f}",
        f"[bold]{ratio:.3f}[/]",
    )
    console.print(table)
    console.print(f"{LEGEND} The queue's figure comes first.", style="dim")
    warn_of_noise(pairs)
    return case.target is None or verdict(case.title, ratio, case.target)


def spec_of(case: Case, block_hash: str) -> ProofSpec:
    return ProofSpec(
        block_hash=block_hash,
        public_key="bench",
        seq_len=case.seq_len,
        options={"k_dim": K_DIM, "stronger_rng": False},
    )


if __name__ == "__main__":
    typer.run(main)
