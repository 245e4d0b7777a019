"""Commands and the output of processes, in the process of the tests."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import typer

from cli.main import app

COMMANDS: Any = typer.main.get_command(app)


def run_here(*arguments: str) -> int:
    """The exit code. CliRunner's own capture would not see file descriptor 1."""
    try:
        app(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def shown() -> Callable[[str], None]:
    """Returns a `print` for threads: it prints to the sys.stdout of now, from which pytest shows it
    for a test that fails. The sys.stdout of then may be the one that CliRunner reads.
    """
    return partial(print, file=sys.stdout, flush=True)
