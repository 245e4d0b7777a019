"""What tests ask about processes, and waiting for what should come true."""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from tests.harness.waiting import wait_until

MIB = 1024 * 1024


def descendants(root: int) -> list[psutil.Process]:
    """Everything that runs below `root`, whatever session or group it put itself in."""
    try:
        return [
            process
            for process in psutil.Process(root).children(recursive=True)
            if is_running(process)
        ]
    except psutil.NoSuchProcess:
        return []


def is_running(process: psutil.Process | int | None) -> bool:
    """Whether it is neither gone nor a zombie. A pid may be given anew; a Process is that very
    one.
    """
    try:
        found = process if isinstance(process, psutil.Process) else psutil.Process(process or 0)
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def frozen(pid: int | None) -> Iterator[None]:
    """Stops the process, and lets it go on in any case; it may be killed meanwhile."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def command_of(process: psutil.Process) -> str:
    """Its command line, or what it made of it; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def engine_cores(root: int) -> list[psutil.Process]:
    """vLLM's engine processes below `root`."""
    return [process for process in descendants(root) if "EngineCore" in command_of(process)]


def peak_rss(pid: int) -> int:
    """Bytes of memory that the process held at most so far (VmHWM, which psutil does not tell)."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["VmHWM"].split()[0]) * 1024


def assert_all_gone(processes: Iterable[psutil.Process | int], timeout_s: float = 60) -> None:
    left = list(processes)
    wait_until(lambda: not any(map(is_running, left)), f"the end of {left}", timeout_s)
