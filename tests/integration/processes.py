"""What tests ask about processes, from /proc."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MIB = 1024 * 1024


class Process(NamedTuple):
    """A process that its pid alone does not name: pids are given anew."""

    pid: int
    started: str  # clock ticks since boot
    name: str

    @property
    def is_running(self) -> bool:
        found = _read(self.pid)
        return found is not None and found[0] == self.started


def descendants(root: int) -> list[Process]:
    """Everything that runs below `root`, whatever session or group it put itself in."""
    children: dict[int, list[int]] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        found = _read(pid)
        if found is not None:
            children.setdefault(found[1], []).append(pid)
    below, todo = [], [root]
    while todo:
        pids = children.get(todo.pop(), [])
        below += pids
        todo += pids
    return [process for process in map(process_of, below) if process is not None]


def process_of(pid: int) -> Process | None:
    """None when it has ended."""
    found = _read(pid)
    return None if found is None else Process(pid, found[0], _name(pid))


def peak_rss(pid: int) -> int:
    """Bytes of memory that the process held at most so far (VmHWM)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60, pause_s: float = 0.05) -> float:
    """Seconds until `condition` held. AssertionError naming `what` after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(pause_s)
    return time.monotonic() - began


def assert_all_gone(processes: list[Process], timeout_s: float = 20) -> None:
    wait_until(
        lambda: not any(process.is_running for process in processes),
        f"the end of {[process for process in processes if process.is_running]}",
        timeout_s,
    )


def _read(pid: int) -> tuple[str, int] | None:
    """(start time, parent) of a process that is no zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (fields[19], int(fields[1]))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:80]
    except OSError:
        return "?"
