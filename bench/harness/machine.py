"""What a machine does while a benchmark runs: without it figures of a shared one mean little."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from cli.machine.gpus import visible_gpus
from poc_core.gpus import nvml

T = TypeVar("T")

# Cores that other programs may use: more, and a run is disturbed.
QUIET = 0.1

# Disturbed runs are repeated until there are so many times the runs asked for.
_MOST_TRIES = 3

# Seconds over which `wait_until_quiet` looks at the machine.
_LOOK_S = 1.0

# Seconds before the first look: after its last batch a vLLM process spins for one before it sleeps.
_SETTLE_S = 1.5


@dataclass(frozen=True)
class Usage:
    """CPU time of a stretch of wall time in cores: 0.5 is half a core, 2.0 two cores."""

    wall_s: float
    own: float  # this process and everything it started
    others: float  # every other program, and what the hypervisor took
    load_before: float  # 1-minute load average; it lags behind and counts our own processes too
    load_after: float


@dataclass(frozen=True)
class Observed(Generic[T]):
    """What a measurement yielded, and how far others disturbed it."""

    result: T
    others: float  # cores that other programs used
    counts: bool = True


class UsageMeter:
    """Measures CPU time from its creation on."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._own_s = sum(tree_cpu_s(os.getpid()).values())
        self._busy_s = _busy_s()
        self._began = time.monotonic()

    def read(self) -> Usage:
        wall_s = time.monotonic() - self._began
        busy_s = _busy_s() - self._busy_s
        own_s = max(0.0, sum(tree_cpu_s(os.getpid()).values()) - self._own_s)
        return Usage(
            wall_s,
            own_s / wall_s,
            max(0.0, busy_s - own_s) / wall_s,
            self._load,
            os.getloadavg()[0],
        )


def repeated(measure: Callable[[int], tuple[T, float]], repeat: int) -> list[Observed[T]]:
    """Calls `measure` until `repeat` calls went undisturbed, but at most three times as often.

    Then the `repeat` calls with the quietest machine count; what they measured has no say in that.
    `measure` is given the number of the
    call and returns its result and the cores that others used meanwhile.
    """
    found: list[tuple[T, float]] = []
    while (
        len(found) < repeat * _MOST_TRIES and sum(others <= QUIET for _, others in found) < repeat
    ):
        found.append(measure(len(found)))
    limit = sorted(others for _, others in found)[repeat - 1]
    return [Observed(result, others, counts=others <= limit) for result, others in found]


def wait_until_quiet(patience_s: float) -> None:
    """Waits until other programs are quiet, but no longer than `patience_s` seconds."""
    time.sleep(_SETTLE_S)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        meter = UsageMeter()
        time.sleep(_LOOK_S)
        if meter.read().others < QUIET:
            return


def tree_cpu_s(root: int) -> dict[int, float]:
    """pid -> CPU seconds, of `root` and everything that descends from it and still runs."""
    tree: dict[int, float] = {}
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                tree[member.pid] = cpu_s(member)
    return tree


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of one process, without those of its children. NoSuchProcess: it ended."""
    times = process.cpu_times()
    return float(times.user + times.system)


def trees_cpu_s(roots: Iterable[int]) -> float:
    """CPU seconds of several process trees."""
    return sum(sum(tree_cpu_s(root).values()) for root in roots)


def gpu_mib() -> int:
    """MiB that are taken of the GPUs this process may use, together; 0 without any."""
    with nvml() as library:
        if library is None:
            return 0
        devices = (library.nvmlDeviceGetHandleByIndex(int(gpu)) for gpu in visible_gpus())
        return sum(int(library.nvmlDeviceGetMemoryInfo(device).used) for device in devices) >> 20


def describe() -> str:
    """The machine in a line."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    gib = psutil.virtual_memory().total / 1024**3
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB"


def _busy_s() -> float:
    times = psutil.cpu_times()
    # Steal is what the hypervisor gave to others. Guest time is part of user.
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)
