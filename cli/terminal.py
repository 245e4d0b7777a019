"""Input and output of commands: messages go to stderr, results to stdout."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from poc_core import errors

if TYPE_CHECKING:  # rich takes a while to import, and most commands need little of it
    from rich.console import Console
    from rich.progress import Progress

_people: TextIO | None = None  # stream for notes; None for stderr

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_FRAUD = 3
EXIT_INTERRUPTED = 130  # the status that a shell reports for a program ended by Ctrl-C


class UsageError(errors.ProoflineError):
    """The input on the command line is invalid. The text gives the correct form."""


def exit_code_of(error: errors.ProoflineError) -> int:
    wrong_input = (UsageError, errors.OptionsError, errors.SpecError, errors.SettingsError)
    return EXIT_USAGE if isinstance(error, wrong_input) else EXIT_FAILURE


@contextmanager
def people_at(stream: TextIO) -> Iterator[None]:
    """Makes `note` write to `stream` instead of stderr inside the context."""
    global _people
    before, _people = _people, stream
    try:
        yield
    finally:
        _people = before


def show_error(error: errors.ProoflineError) -> None:
    note(f"{typer.style('error:', fg=typer.colors.RED, bold=True)} {error}")


def note(message: str) -> None:
    """Prints a message. A message that cannot be written is lost, and the command continues."""
    with suppress(OSError):
        typer.echo(message, file=_people, err=True)


def stderr_console() -> "Console":
    from rich.console import Console

    return Console(file=_people, stderr=True)


def progress_bar(unit: str) -> "Progress":
    """Returns a progress bar, or ProgressLines in a log. `unit`: what is counted, e.g. "nonces"."""
    from rich import progress

    from cli.progress_lines import ProgressLines

    console = stderr_console()
    if not console.is_terminal or console.is_dumb_terminal:
        return ProgressLines(unit, note)
    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
    )


def check_output(output: Path | None, option: str = "--output") -> None:
    """Raises UsageError if --output cannot be written. `option`: the option's name in the error."""
    try:
        is_wrong = output and (output.is_dir() or not output.absolute().parent.is_dir())
    except OSError:  # too long a name, or a directory that may not be entered
        is_wrong = True
    if is_wrong:
        raise UsageError(
            f"{output} cannot be written: it is a directory, its directory is missing, or its name"
            f" is too long; choose another {option}."
        )


def read_ascii(path: Path, option: str) -> str:
    try:
        return path.expanduser().read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {path} cannot be read: {error}") from None


def read_json(path: Path, what_to_do: str, stdin: TextIO | None = None) -> Any:
    """Reads JSON from `stdin` or, if None, from `path`. Raises a UsageError, which ends with
    `what_to_do`, if there is no readable JSON.
    """
    try:
        text = stdin.read() if stdin else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path} ({error}); {what_to_do}.") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); {what_to_do}.") from error


def write_json(document: Any, output: Path | None) -> None:
    """Writes the document as one line of JSON to a file, or to stdout if `output` is None."""
    text = json.dumps(document, separators=(",", ":")) + "\n"
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"Cannot write {output} ({error.strerror}); choose another --output."
        ) from error
