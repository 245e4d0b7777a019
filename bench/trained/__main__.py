"""Distances of honest machines and cheats with a trained model: writes bench/results/trained.md.

`make docs-tables` copies the tables into docs/proofs.md, decode.md and chat.md.

    python -m bench.trained
    python -m bench.trained --tables  # of the results in the folder

Each machine's results are stored in --folder and not computed again, so a stopped run continues.
"""

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from bench.harness.report import run, say
from bench.trained.machines import MACHINES, PARTS, Plan, ask_all, judge
from bench.trained.tables import ROOT, distances, draw, proofs, tables
from cli.demo_model import demo_model

RESULTS = ROOT / "bench/results/trained.md"


def main(
    folder: Annotated[Path, typer.Option(help="Where results are kept.")] = Path("build/trained"),
    seed: Annotated[int, typer.Option(help="Of block hashes and samplers.")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Parts that begin with this, of {', '.join(PARTS)}; repeatable."),
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(help="Compute only for this machine; repeatable. Default: all."),
    ] = None,
    only_tables: Annotated[bool, typer.Option("--tables", help="Compute nothing.")] = False,
) -> None:
    """Computes missing results, writes bench/results/trained.md and draws the picture."""
    if not only_tables:
        parts = tuple(part for part in PARTS if part.startswith(tuple(only or PARTS)))
        compute(folder, Plan(seed, parts), machine)
    found = tables(folder)
    if machine or not found:
        return
    write(found, seed)
    if "docs/proofs.md" in found:
        draw(distances(proofs(folder, 256)), ROOT / "docs/pictures/trained.svg")


def compute(folder: Path, plan: Plan, names: list[str] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = demo_model()
    wanted = [one for one in MACHINES if not names or one.name in names]
    for _, alike in groupby(wanted, lambda one: (one.weights, one.engine, one.dtype)):
        ask_all(tuple(alike), model, folder, plan)
    if not names:
        judge(model, folder, plan)


def write(found: dict[str, list[str]], seed: int) -> None:
    from vllm.version import __version__ as vllm

    text = [
        "# A trained model: honest machines and cheats",
        "",
        f"`python -m bench.trained --seed {seed}` wrote this with vLLM {vllm},"
        f" transformers {version('transformers')} and torch {version('torch')} on a CPU"
        f" ({platform.machine()}), {datetime.now(UTC):%Y-%m-%d}.",
    ]
    for page, lines in found.items():
        text += ["", f"## {page}", "", *lines]
    RESULTS.write_text("\n".join(text) + "\n")
    say("\n".join(text), markup=False)


if __name__ == "__main__":
    run(main)
