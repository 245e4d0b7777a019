"""How both benchmarks speak: a table, a verdict, an exit status."""

from collections.abc import Callable, Sequence
from typing import Any

import typer
from rich.console import Console

from bench.harness.machine import QUIET, Observed
from poc_core.errors import ProoflineError

console = Console()

LEGEND = (
    "Others: cores that other programs used. Runs in parentheses were disturbed and do not count."
)


def warn_of_noise(runs: Sequence[Observed[Any]]) -> None:
    """Says so when disturbed runs had to count."""
    others = max(run.others for run in runs if run.counts)
    if others > QUIET:
        console.print(
            f"[yellow]The machine was not quiet[/]: others used up to {others:.2f} cores in runs"
            " that count."
        )


def verdict(what: str, ratio: float, target: float) -> bool:
    passed = ratio >= target
    word = "[bold green]PASS[/]" if passed else "[bold red]FAIL[/]"
    console.print(f"{word} {what}: {ratio:.3f}, target {target:.2f}\n", highlight=False)
    return passed


def run(command: Callable[..., None]) -> None:
    """Runs a benchmark's command; wrong options end it with a line and exit status 2."""
    try:
        typer.run(command)
    except ProoflineError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        raise SystemExit(2) from None


def exit_with(measure: Callable[[], bool]) -> None:
    """Runs a benchmark. Exit status: 0 passed, 1 failed or broken, 130 for Ctrl-C."""
    try:
        passed = measure()
    except ProoflineError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(0 if passed else 1)
