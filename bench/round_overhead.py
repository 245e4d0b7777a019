"""How much of a bare engine's speed is left in a round, with its leases, counters and callbacks.

    .venv/bin/python bench/round_overhead.py

The round runs for a set time on one real vLLM worker and delivers to a receiver; a bare loop on the
very same engine then computes as many of the same nonces. The sides take turns, so that whatever
else changes on the machine meets both.
"""

import statistics
from dataclasses import dataclass
from typing import Annotated

import httpx
import numpy as np
import typer
from pydantic import JsonValue
from rich.table import Table

from bench.harness import machine
from bench.harness.open_worker import CHAT_POLICY_HELP, OpenStack
from bench.harness.report import console, exit_with, verdict
from bench.harness.timed_round import RoundRun, Sink, run_round
from poc_core.arithmetic.encoding import decode_vector
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from workers.engines.kinds import EngineKind
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 600.0  # the first start compiles kernels
HTTP_TIMEOUT_S = 60.0
K_DIM = 12
BATCH_SIZE = 32
SEQ_LEN = 256
TARGET = 0.95
# Seconds of a round before the first that counts: micro-batches grow to POC_MAX_STEP_MS's size.
WARM_UP_S = 6.0
# The two sides batch differently, which shows in bfloat16: nearly all vectors must agree within
# this L2 distance.
SAME_WITHIN = 0.05
SAME_SHARE = 0.99


@dataclass(frozen=True)
class Pair:
    """A round and the bare loop over its nonces."""

    round: RoundRun
    loop_s: float
    round_usage: machine.Usage
    loop_usage: machine.Usage

    @property
    def round_rate(self) -> float:
        return self.round.n_nonces / self.round.seconds

    @property
    def loop_rate(self) -> float:
        return self.round.n_nonces / self.loop_s


class MismatchError(ProoflineError):
    """The two sides did not do the same work."""


@dataclass(frozen=True)
class Sides:
    """The ways to the engine; only one of them is used at a time."""

    stack: OpenStack
    client: httpx.Client
    sink: Sink
    quiet_wait_s: float

    def pair(self, index: int, seconds: float) -> Pair:
        # The loop needs to know how many nonces the round computes. It goes between two rounds: a
        # drift of the machine's speed meets the one before and the one after it.
        spec = spec_of(f"block-{index}")
        round_run, round_usage = self._round(spec, seconds / 2)
        loop_s, values, loop_usage = self._loop(spec, 2 * round_run.n_nonces)
        second, second_usage = self._round(spec, seconds / 2)
        check_same(second.vectors, values)
        both = RoundRun(
            round_run.seconds + second.seconds, round_run.n_nonces + second.n_nonces, second.vectors
        )
        scaled_s = loop_s * both.n_nonces / (2 * round_run.n_nonces)
        return Pair(
            both,
            scaled_s,
            max(round_usage, second_usage, key=lambda usage: usage.others),
            loop_usage,
        )

    def warm_up(self) -> None:
        spec = spec_of("warm-up")
        run_round(self.client, self.sink, spec, self.stack.model_name, BATCH_SIZE, WARM_UP_S)
        self.stack.loop(spec, range(4 * BATCH_SIZE), BATCH_SIZE)

    def _round(self, spec: ProofSpec, seconds: float) -> tuple[RoundRun, machine.Usage]:
        machine.wait_until_quiet(self.quiet_wait_s)
        meter = machine.UsageMeter()
        run = run_round(self.client, self.sink, spec, self.stack.model_name, BATCH_SIZE, seconds)
        return run, meter.read()

    def _loop(self, spec: ProofSpec, n_nonces: int) -> tuple[float, list[JsonValue], machine.Usage]:
        machine.wait_until_quiet(self.quiet_wait_s)
        meter = machine.UsageMeter()
        seconds, values = self.stack.loop(spec, range(n_nonces), BATCH_SIZE)
        return seconds, values, meter.read()


def main(
    repeat: Annotated[
        int, typer.Option(min=1, help="Pairs of runs that count; their medians are compared.")
    ] = 5,
    seconds: Annotated[
        float, typer.Option(min=10, help="How long each side computes for a pair.")
    ] = 50.0,
    model: Annotated[
        str, typer.Option(help="A shipped model, a directory or a name on the hub.")
    ] = "tiny-qwen3",
    engine: Annotated[EngineKind, typer.Option(help="vllm or transformers.")] = "vllm",
    chat_policy: Annotated[str, typer.Option(help=CHAT_POLICY_HELP)] = "off",
    quiet_wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait before each run until other programs are quiet."),
    ] = 60.0,
) -> None:
    """Nonces/s of a round over those of a bare loop on the same engine, one after the other.

    Pairs of runs that other programs disturbed are repeated, at most twice. Exits with 1 when the
    target is missed.
    """
    options = EngineOptions(model=model, engine=engine)
    exit_with(lambda: measure(repeat, seconds, options, chat_policy, quiet_wait))


def measure(
    repeat: int, seconds: float, options: EngineOptions, chat_policy: str, quiet_wait_s: float
) -> bool:
    """Prints a table; True when the target is reached."""
    env = {"POC_CHAT_POLICY": chat_policy}
    with OpenStack(options, max_fast_crashes=0, env=env) as stack:
        console.print(
            f"{machine.describe()}; engine {options.engine}, model {stack.model_name}, chat policy"
            f" {chat_policy}",
            highlight=False,
        )
        stack.wait_ready(READY_TIMEOUT_S)
        with (
            httpx.Client(
                base_url=stack.base_url, timeout=HTTP_TIMEOUT_S, trust_env=False
            ) as client,
            Sink() as sink,
        ):
            sides = Sides(stack, client, sink, quiet_wait_s)
            sides.warm_up()

            def measure_pair(index: int) -> tuple[Pair, float]:
                pair = sides.pair(index, seconds)
                return pair, max(pair.round_usage.others, pair.loop_usage.others)

            return report(machine.repeated(measure_pair, repeat))


def report(pairs: list[machine.Observed[Pair]]) -> bool:
    title = f"batch {BATCH_SIZE}, seq_len {SEQ_LEN}"
    table = Table(title=f"Round overhead: {title}")
    for heading in ("run", "nonces", "round\nnonces/s", "bare loop\nnonces/s", "ratio"):
        table.add_column(heading, justify="right")
    for heading in ("others\ncores", "load\naverage"):
        table.add_column(heading, justify="right", style="dim")
    for index, observed in enumerate(pairs, start=1):
        pair = observed.result
        table.add_row(
            f"{index}" if observed.counts else f"({index})",
            f"{pair.round.n_nonces}",
            f"{pair.round_rate:.1f}",
            f"{pair.loop_rate:.1f}",
            f"{pair.round_rate / pair.loop_rate:.3f}",
            f"{pair.round_usage.others:.2f} {pair.loop_usage.others:.2f}",
            f"{pair.round_usage.load_before:.1f} {pair.loop_usage.load_before:.1f}",
            style=None if observed.counts else "dim",
        )
    counted = [observed.result for observed in pairs if observed.counts]
    round_rate = statistics.median(pair.round_rate for pair in counted)
    loop_rate = statistics.median(pair.loop_rate for pair in counted)
    ratio = round_rate / loop_rate
    table.add_section()
    table.add_row("median", "", f"{round_rate:.1f}", f"{loop_rate:.1f}", f"[bold]{ratio:.3f}[/]")
    console.print(table)
    console.print(
        "others: programs that are not the benchmark's. Figures of the round come first. Runs in"
        " parentheses were disturbed and do not count.",
        style="dim",
    )
    return verdict(title, ratio, TARGET)


def check_same(vectors: dict[int, str], values: list[JsonValue]) -> None:
    shared = [(vectors[nonce], value) for nonce, value in enumerate(values) if nonce in vectors]
    of_round, of_loop = (
        np.stack([decode_vector(str(each), K_DIM) for each in side])
        for side in zip(*shared, strict=True)
    )
    agree = np.mean(np.linalg.norm(of_round - of_loop, axis=1) <= SAME_WITHIN)
    if agree < SAME_SHARE:
        raise MismatchError(
            f"Only {agree:.1%} of the round's artifacts are the bare loop's; their speeds do not"
            " compare."
        )


def spec_of(block_hash: str) -> ProofSpec:
    return ProofSpec(
        block_hash=block_hash,
        public_key="bench",
        seq_len=SEQ_LEN,
        options={"k_dim": K_DIM, "stronger_rng": False},
    )


if __name__ == "__main__":
    typer.run(main)
