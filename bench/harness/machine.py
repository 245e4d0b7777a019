"""The machine during a benchmark: how much CPU time other programs use, and the GPUs' memory."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from cli.machine.gpus import visible_gpus
from poc_core.gpus import nvml

T = TypeVar("T")

# A run is disturbed if other programs use more cores.
QUIET = 0.1
# Most calls of `repeated` for each call that is to count.
_MOST_TRIES = 3
# Seconds over which `wait_until_quiet` measures the CPU use.
_LOOK_S = 1.0
# Seconds before the first look: vLLM's processes spin for one second after their last batch.
_SETTLE_S = 1.5


@dataclass(frozen=True)
class Usage:
    """CPU time per second of wall time, in cores: 0.5 is half a core."""

    own: float  # of this process and everything it started
    others: float  # of all other programs, and what the hypervisor took


@dataclass(frozen=True)
class Observed(Generic[T]):
    """The result of a run, and how much other programs disturbed the run."""

    result: T
    others: float  # cores that other programs used
    counts: bool = True


class UsageMeter:
    """A measurement of CPU time that starts with the meter's creation."""

    def __init__(self) -> None:
        self._own_s, self._busy_s = tree_cpu_s(os.getpid()), _busy_s()
        self._began = time.monotonic()

    def read(self) -> Usage:
        wall_s = time.monotonic() - self._began
        own_s = max(0.0, tree_cpu_s(os.getpid()) - self._own_s)
        return Usage(own_s / wall_s, max(0.0, _busy_s() - self._busy_s - own_s) / wall_s)


def measured(work: Callable[[], T], quiet_wait_s: float) -> tuple[T, Usage]:
    """Waits for a quiet machine, then calls `work`; returns the result and the CPU use."""
    wait_until_quiet(quiet_wait_s)
    meter = UsageMeter()
    return work(), meter.read()


def repeated(measure: Callable[[int], tuple[T, float]], repeat: int) -> list[Observed[T]]:
    """Calls `measure` until `repeat` calls were undisturbed, at most three times as often.

    `measure` gets the number of the call and returns its result and the cores that other programs
    used during the call. The `repeat` calls with the least disturbance count.
    """
    found: list[tuple[T, float]] = []
    while (
        len(found) < repeat * _MOST_TRIES and sum(others <= QUIET for _, others in found) < repeat
    ):
        found.append(measure(len(found)))
    limit = sorted(others for _, others in found)[repeat - 1]
    return [Observed(result, others, counts=others <= limit) for result, others in found]


def counted(runs: Sequence[Observed[T]]) -> list[T]:
    """Returns the results of the runs that count."""
    return [run.result for run in runs if run.counts]


def wait_until_quiet(patience_s: float) -> None:
    """Waits until other programs are quiet, for at most `patience_s` seconds."""
    time.sleep(_SETTLE_S)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        meter = UsageMeter()
        time.sleep(_LOOK_S)
        if meter.read().others < QUIET:
            return


def tree_cpu_s(*roots: int) -> float:
    """Returns the CPU seconds of the processes `roots` and of all their running descendants."""
    total = 0.0
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(root)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # it has ended
                    total += cpu_s(member)
    return total


def cpu_s(process: psutil.Process) -> float:
    """Returns the CPU seconds of one process, without its children. NoSuchProcess: it has ended."""
    return float(sum(process.cpu_times()[:2]))


def gpu_mib() -> int:
    """Returns the MiB in use on all GPUs that this process may use; 0 without a GPU."""
    with nvml() as library:
        if library is None:
            return 0
        devices = (library.nvmlDeviceGetHandleByIndex(int(gpu)) for gpu in visible_gpus())
        return sum(int(library.nvmlDeviceGetMemoryInfo(device).used) for device in devices) >> 20


def describe() -> str:
    """Returns the CPU model, the number of cores and the memory as one line."""
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
