"""Logs on stderr and end by signals, for commands that supervise others in the foreground."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cli.terminal import note

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COLORS = (36, 33, 32, 35, 34)  # ANSI, one after the other for each process; red stays for errors


@contextmanager
def stopped_by_signals(command: str) -> Iterator[None]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into an orderly, successful end of the block."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        note(f"{command}: everything has stopped")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hurry_on_signals(kill: Callable[[], None], what_stops: str) -> None:
    """Makes a further signal, while all is stopped, call `kill`."""
    note(f"{what_stops}; a second Ctrl-C does not wait for them")
    for number in STOP_SIGNALS:
        signal.signal(number, lambda _number, _frame: kill())


class LabelledLog:
    """Writes the lines of all processes to stderr, each behind its process's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._colors: dict[str, int] = {}
        self._in_color = sys.stderr.isatty()

    def __call__(self, name: str, line: str) -> None:
        with self._lock:
            label = f"{name:<9}|"
            if self._in_color:
                color = self._colors.setdefault(name, COLORS[len(self._colors) % len(COLORS)])
                label = f"\x1b[{color}m{label}\x1b[0m"
            sys.stderr.write(f"{label} {line}\n")
            sys.stderr.flush()
