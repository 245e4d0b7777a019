"""What benchmarks print: tables, verdicts, lines of JSON; their common options; exit statuses."""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from bench.harness.machine import QUIET, Observed
from poc_core.errors import ProoflineError

T = TypeVar("T")
console = Console(highlight=False)
LEGEND = (
    "Others: cores that other programs used. Runs in parentheses were disturbed and do not count."
)

Repeat = Annotated[int, typer.Option(min=1, help="Runs that count; medians are compared.")]
QuietWait = Annotated[
    float,
    typer.Option(min=0, help="Seconds to wait before each run until other programs are quiet."),
]
ChatPolicy = Annotated[
    str,
    typer.Option(
        help="POC_CHAT_POLICY of the worker. Any policy except off cuts micro-batches into slices"
        " of at most POC_MAX_STEP_MS."
    ),
]
Model = Annotated[str, typer.Option(help="A shipped model, a directory or a name on the hub.")]
SeqLens = Annotated[list[int] | None, typer.Option(help="Positions of a nonce; may be repeated.")]


def say(text: str, markup: bool = True) -> None:
    """Prints a text without wrapping its lines."""
    console.print(text, markup=markup, soft_wrap=True)


def say_json(**figures: Any) -> None:
    """Prints the figures as one line of JSON, floats with four decimals."""
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in figures.items()
    }
    say(json.dumps(rounded), markup=False)


def table(title: str, *headings: str, dim: int = 0) -> Table:
    """Returns an empty table with right-aligned columns, the last `dim` of them dim."""
    made = Table(title=title)
    for place, heading in enumerate(headings):
        style = "dim" if place >= len(headings) - dim else None
        made.add_column(heading, justify="right", style=style)
    return made


def listed(runs: Sequence[Observed[T]], shown: Callable[[T], str]) -> str:
    """Returns the results of all runs as text, those of disturbed runs in parentheses."""
    return " ".join(shown(run.result) if run.counts else f"({shown(run.result)})" for run in runs)


def warn_of_noise(runs: Sequence[Observed[Any]]) -> None:
    """Prints a warning if disturbed runs count."""
    others = max(run.others for run in runs if run.counts)
    if others > QUIET:
        say(
            f"[yellow]The machine was not quiet[/]: others used up to {others:.2f} cores in runs"
            " that count."
        )


def judged(passed: bool, text: str) -> bool:
    """Prints whether a target is met; returns `passed`."""
    say(f"[bold {'green]PASS' if passed else 'red]FAIL'}[/] {text}")
    return passed


def at_least(what: str, found: float, least: float, form: str = ".3f") -> bool:
    """Prints and returns whether a figure reaches its target."""
    return judged(found >= least, f"{what}: {found:{form}}, at least {least:{form}}")


def at_most(what: str, found: float, most: float, form: str = ".3f") -> bool:
    """Prints and returns whether a figure stays within its limit."""
    return judged(found <= most, f"{what}: {found:{form}}, at most {most:{form}}")


def measures(command: Callable[..., bool | None]) -> Callable[..., None]:
    """Decorator that makes a benchmark's result the exit status of its command.

    0: all targets are met; 1: a target is missed, or the benchmark failed; 130: Ctrl-C.
    """

    @functools.wraps(command)
    def exits(**options: Any) -> None:
        try:
            missed = command(**options) is False
        except ProoflineError as error:
            say(f"[bold red]error:[/] {error}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        raise typer.Exit(int(missed))

    return exits


def run(command: Callable[..., None]) -> None:
    """Runs a benchmark's command; wrong options end the program with status 2."""
    try:
        typer.run(command)
    except ProoflineError as error:
        say(f"[bold red]error:[/] {error}")
        raise SystemExit(2) from None


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Returns a parser that prints the text as it is for --help."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=form)
