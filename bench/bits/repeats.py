"""How far an engine's artifacts lie from its own: of a second run, and of one cut between layers.

    python -m bench.bits.repeats --model tiny-qwen3 --seq-len 64  # anywhere
    python -m bench.bits.repeats --dimensions deepseek-v4-flash --layers 8 -- --max-model-len 2048
    PROOFLINE_FUSED=off python -m bench.bits.repeats --dimensions ...  # experts' rows as they come

Most engines give the same bits each time. Sparse attention does not where it chooses tokens, nor do
Marlin's experts.
"""

import json
from typing import Annotated

import typer
from rich.table import Table

from bench.harness import machine
from bench.harness.engine import engine_of, takes_engine
from bench.harness.report import console, exit_with, run
from lab.measure.artifact_distance import distance
from lab.measure.speed import spec_of
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan

# Times as far as runs of whole micro-batches that cut ones may lie from the first.
MOST = 3.0


@takes_engine(dimensions="qwen3-0.6b")
def main(
    *,
    engine_options: EngineOptions,
    seq_len: Annotated[
        list[int] | None, typer.Option(help="Positions of a nonce; may be repeated.")
    ] = None,
    nonces: Annotated[
        list[int] | None, typer.Option(help="Of a micro-batch; may be repeated.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Further runs of each.")] = 3,
) -> None:
    """Mean and largest L2 of each run from the first. Exit 1: cut ones lie further than whole."""

    def measure() -> bool:
        table = Table(title="L2 from the first run")
        for heading in ("seq_len", "nonces", "run", "mean", "largest"):
            table.add_column(heading, justify="right")
        with engine_of(engine_options) as engine:
            passed = [
                compared(engine, length, n, repeat, table)
                for length in seq_len or [64, 256, 1024]
                for n in nonces or [2, 8]
            ]
        console.print(f"{machine.describe()}", highlight=False)
        console.print(table)
        return all(passed)

    exit_with(measure)


def compared(engine: Engine, seq_len: int, n: int, repeat: int, table: Table) -> bool:
    """Adds the rows of a shape. True: cut micro-batches are as near as whole ones."""
    spec, one_layer = spec_of(seq_len), SlicePlan(0.0, 1)
    first = compute_all(engine, spec, range(n))
    means = []
    for what, plan in (("whole", None), ("cut after each layer", one_layer)):
        if plan is not None and not engine.sliceable:
            console.print("[yellow]not cut: its layers cannot be run one by one[/]")
            continue
        runs = [compute_all(engine, spec, range(n), plan) for _ in range(repeat)]
        found = [distance(spec, one, first) for one in runs]
        means.append(max(one.mean for one in found))
        largest = max(one.largest for one in found)
        table.add_row(f"{seq_len}", f"{n}", what, f"{means[-1]:.6f}", f"{largest:.6f}")
        told = {"seq_len": seq_len, "nonces": n, "run": what, "mean": means[-1]}
        console.print(json.dumps(told | {"largest": largest}), highlight=False, soft_wrap=True)
    whole, *cut = means
    return all(one <= MOST * whole for one in cut)


if __name__ == "__main__":
    run(main)
