"""Logs and signals for commands that supervise child processes in the foreground."""

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from cli.supervise.log_folder import LogFolder
from cli.terminal import UsageError, note
from poc_core.errors import ProoflineError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Warnings and errors of our processes and uvicorn's, not vLLM's many at each start.
TELLING = re.compile(
    r"^\[[^\]]*: (WARNING|ERROR|CRITICAL)(/[^\]]*)?\]|^(WARNING|ERROR|CRITICAL): |^error: "
)
COLORS = (36, 33, 32, 35, 34)  # ANSI colours of the processes, in turn; red is for errors


@contextmanager
def interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Makes each of these signals raise KeyboardInterrupt inside the context, as Ctrl-C does."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in _heard(numbers)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stopped_by_signals(command: str) -> Iterator[None]:
    """Ends the context without an error on the first SIGINT, SIGTERM or SIGHUP."""
    with interrupted_by(*STOP_SIGNALS):
        try:
            yield
        except KeyboardInterrupt:
            note(f"{command}: everything has stopped")


def hurry_on_signals(kill: Callable[[], None], what_stops: str) -> None:
    """Prints `what_stops`, and makes the next SIGINT, SIGTERM or SIGHUP call `kill`."""
    note(f"{what_stops}; a second Ctrl-C does not wait for them")
    for number in _heard(STOP_SIGNALS):
        signal.signal(number, lambda _number, _frame: kill())


def _heard(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Returns the signals without a SIGHUP that `nohup` ignores."""
    return [
        number
        for number in numbers
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


class LabelledLog:
    """A log function that writes each line to stderr, labelled with its process's name. A line that
    cannot be written is lost.
    """

    def __init__(self, where: str | None = None) -> None:
        """`where`: a sentence for the operator that says why the logs are on stderr."""
        self.where = where
        self._lock = threading.Lock()
        self._colors: dict[str, int] = {}
        self._stderr = sys.stderr

    def __call__(self, name: str, line: str) -> None:
        with self._lock, suppress(OSError):
            label = f"{name:<8} |"
            if self._stderr.isatty():
                color = self._colors.setdefault(name, COLORS[len(self._colors) % len(COLORS)])
                label = f"\x1b[{color}m{label}\x1b[0m"
            self._stderr.write(f"{label} {line}\n")
            self._stderr.flush()


class QuietLog:
    """A log function that writes to one file per process, warnings and errors also to stderr."""

    def __init__(self, folder: LogFolder) -> None:
        self.where = f"the processes' logs are in {folder.path}; --verbose shows them here"
        self._folder = folder
        self._shown = LabelledLog()

    def __call__(self, name: str, line: str) -> None:
        self._folder.write(name, line)
        if TELLING.search(line):
            self._shown(name, line)


@contextmanager
def logs_of_children(verbose: bool, parent: Path | None = None) -> Iterator[QuietLog | LabelledLog]:
    """Yields the function that logs the output lines of child processes.

    The function is a QuietLog that writes to files below `parent` (None: the user's state folder).
    It is a LabelledLog if `verbose` is True or if no files can be written. If a ProoflineError
    leaves the context, the path of the log files is added to its text.
    """
    folder = why = None
    try:
        folder = None if verbose else LogFolder(parent)
    except (OSError, RuntimeError) as error:
        why = f"the processes' logs are shown here, as no file can be written ({error})"
    if folder is None:
        yield LabelledLog(why)
        return
    try:
        yield QuietLog(folder)
    except ProoflineError as error:
        if folder.is_used and not isinstance(error, UsageError):
            error.args = (f"{error}\n  The whole logs are in {folder.path}",)
        raise
    finally:
        folder.close()
