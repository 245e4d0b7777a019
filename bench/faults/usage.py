"""Memory and file descriptors of a stack's processes, which must not keep growing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import psutil

from cli.supervise.processes import Child

# Largest ratio of a process's use at its last look to that at the first look that counts.
MOST_GROWTH = 1.5
_MIB = 2**20


class Use(NamedTuple):
    pid: int
    name: str
    rss: int  # bytes
    descriptors: int


def uses_of(children: Iterable[Child]) -> Iterator[Use]:
    """Yields the use of each of a stack's processes and of their descendants."""
    for child in children:
        try:
            process = psutil.Process(child.pid)
            family = [(child.spec.name, process)]
            for one in process.children(recursive=True):
                family.append((f"{child.spec.name}'s {one.name()}", one))
        except (psutil.NoSuchProcess, TypeError):
            continue
        for name, process in family:
            with suppress(psutil.NoSuchProcess):
                yield Use(process.pid, name, process.memory_info().rss, process.num_fds())


class Usage:
    """Compares the use of each process at its last look with the use after `settle_s`."""

    def __init__(
        self,
        measure: Callable[[], Iterable[Use]],
        settle_s: float,
        free_mib: int,
        free_descriptors: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settle_s`: seconds of a process's life before the first look that counts.

        A process may grow by half; `free_mib` and `free_descriptors` are allowed in any case.
        """
        self._measure = measure
        self._settle_s = settle_s
        self._free_bytes = free_mib * _MIB
        self._free_descriptors = free_descriptors
        self._clock = clock
        self._seen_at: dict[int, float] = {}  # by pid, as the others
        self._first: dict[int, Use] = {}
        self._last: dict[int, Use] = {}

    def look(self) -> None:
        now = self._clock()
        for use in self._measure():
            if now - self._seen_at.setdefault(use.pid, now) >= self._settle_s:
                self._first.setdefault(use.pid, use)
                self._last[use.pid] = use

    def growth(self) -> list[str]:
        """Returns a sentence for each process that grew too much."""
        found = []
        for pid, last in self._last.items():
            first = self._first[pid]
            if last.rss > first.rss * MOST_GROWTH and last.rss - first.rss > self._free_bytes:
                found.append(
                    f"memory of {last.name} grew from {first.rss / _MIB:.0f} to"
                    f" {last.rss / _MIB:.0f} MiB"
                )
            if last.descriptors > first.descriptors * MOST_GROWTH + self._free_descriptors:
                found.append(
                    f"descriptors of {last.name} grew from {first.descriptors} to"
                    f" {last.descriptors}"
                )
        return found

    def text(self) -> list[str]:
        """Returns a line for each name: the process with the most memory."""
        largest: dict[str, Use] = {}
        for use in self._last.values():
            if use.name not in largest or use.rss > largest[use.name].rss:
                largest[use.name] = use
        return [
            f"{use.name}: {use.rss / _MIB:.0f} MiB and {use.descriptors} descriptors at the last"
            f" look, {self._first[use.pid].rss / _MIB:.0f} and {self._first[use.pid].descriptors}"
            " at the first"
            for _, use in sorted(largest.items())
        ]
