"""Runs a command in this process."""

from cli.main import app


def run_here(*arguments: str) -> int:
    """The exit code. CliRunner's own capture would not see file descriptor 1."""
    try:
        app(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0
