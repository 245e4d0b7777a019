"""The distance between artifacts of several runs of one engine, whole and cut between layers.

    python -m bench.repeats --model tiny-qwen3 --seq-len 64  # anywhere
    python -m bench.repeats --dimensions deepseek-v4-flash --layers 8 -- --max-model-len 2048
    PROOFLINE_FUSED=off python -m bench.repeats --dimensions ...  # experts' rows as they come

Most engines give the same bits each time, except sparse attention that chooses tokens, and Marlin's
experts.
"""

from typing import Annotated

import typer
from rich.table import Table

from bench.harness.engine import engine_of, takes_engine
from bench.harness.report import SeqLens, console, measures, run, say, say_json, table
from lab.measure.artifact_distance import distance
from lab.measure.speed import spec_of
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan

# Largest ratio of the distances of cut micro-batches to those of whole ones.
MOST = 3.0


@takes_engine(dimensions="qwen3-0.6b")
@measures
def main(
    *,
    engine_options: EngineOptions,
    seq_len: SeqLens = None,
    nonces: Annotated[
        list[int] | None, typer.Option(help="Of a micro-batch; may be repeated.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Further runs of each.")] = 3,
) -> bool:
    """Mean and largest L2 of each run from the first.

    Exits with 1 if cut micro-batches lie further from the first run than whole ones.
    """
    rows = table("L2 from the first run", "seq_len", "nonces", "run", "mean", "largest")
    with engine_of(engine_options) as engine:
        passed = [
            compared(engine, length, n, repeat, rows)
            for length in seq_len or [64, 256, 1024]
            for n in nonces or [2, 8]
        ]
    console.print(rows)
    return all(passed)


def compared(engine: Engine, seq_len: int, n: int, repeat: int, rows: Table) -> bool:
    """Adds the rows of a shape; returns whether cut micro-batches are as near as whole ones."""
    spec, one_layer = spec_of(seq_len), SlicePlan(0.0, 1)
    first = compute_all(engine, spec, range(n))
    means = []
    for what, plan in (("whole", None), ("cut after each layer", one_layer)):
        if plan is not None and not engine.sliceable:
            say("[yellow]not cut: the engine's layers cannot be run one by one[/]")
            continue
        runs = [compute_all(engine, spec, range(n), plan) for _ in range(repeat)]
        found = [distance(spec, one, first) for one in runs]
        means.append(max(one.mean for one in found))
        largest = max(one.largest for one in found)
        rows.add_row(f"{seq_len}", f"{n}", what, f"{means[-1]:.6f}", f"{largest:.6f}")
        say_json(seq_len=seq_len, nonces=n, run=what, mean=means[-1], largest=largest)
    whole, *cut = means
    return all(one <= MOST * whole for one in cut)


if __name__ == "__main__":
    run(main)
