"""What proofs and chats tell of a model that was trained: the tables of docs/proofs.md, decode.md
and chat.md, and their picture.

    python -m bench.trained
    python -m bench.trained --tables  # of what the folder holds, and the picture

What a machine gave is kept in --folder, and not asked for again.
"""

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from bench.harness.report import run
from bench.trained.machines import MACHINES, PARTS, Plan, ask_all, judge
from bench.trained.tables import PICTURE, artifact_samples, draw, tables
from cli.demo_model import demo_model


def main(
    folder: Annotated[Path, typer.Option(help="Where results are kept.")] = Path("build/trained"),
    seed: Annotated[int, typer.Option(help="Of block hashes and samplers.")] = 0,
    seq_len: Annotated[int, typer.Option(min=1, help="Positions of a nonce.")] = 256,
    only: Annotated[
        list[str] | None,
        typer.Option(help="artifacts, chains or answers; may be given again. Default: all."),
    ] = None,
    only_tables: Annotated[bool, typer.Option("--tables", help="Compute nothing.")] = False,
    picture: Annotated[Path, typer.Option(help="Where the picture goes, as SVG.")] = PICTURE,
) -> None:
    """Computes what is not in the folder yet, prints all tables and draws the distances."""
    if not only_tables:
        compute(folder, Plan(seed, seq_len, tuple(only or PARTS)))
    for title, lines in tables(folder).items():
        print(f"\n{title}\n", *lines, sep="\n")
    draw(artifact_samples(folder), picture)


def compute(folder: Path, plan: Plan) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = demo_model()
    for _, alike in groupby(MACHINES, lambda one: (one.weights, one.engine, one.dtype)):
        ask_all(tuple(alike), model, folder, plan)
    judge(model, folder, plan)


if __name__ == "__main__":
    run(main)
