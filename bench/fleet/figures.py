"""The counts of Redis and the CPU time of processes: looks, and differences between two looks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import redis

from bench.harness.machine import cpu_s
from poc_core.state import keys


@dataclass(frozen=True)
class Look:
    """Counts since the start of Redis, and CPU seconds."""

    at: float  # time.monotonic()
    redis_cpu_s: float
    calls: int  # commands, including those in scripts
    reads: int  # of sockets, about one per request
    n_nonces: int
    cpu_s: Mapping[str, float]  # by kind of process


@dataclass(frozen=True)
class Stretch:
    """The difference between two looks."""

    before: Look
    after: Look

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    @property
    def n_nonces(self) -> int:
        return self.after.n_nonces - self.before.n_nonces

    @property
    def redis_cores(self) -> float:
        return (self.after.redis_cpu_s - self.before.redis_cpu_s) / self.seconds

    @property
    def commands_per_s(self) -> float:
        """Returns the commands per second, including those in scripts."""
        return (self.after.calls - self.before.calls) / self.seconds

    @property
    def reads_per_s(self) -> float:
        return (self.after.reads - self.before.reads) / self.seconds

    @property
    def cores(self) -> dict[str, float]:
        """Returns the cores in use by kind of process."""
        before = self.before.cpu_s
        return {kind: (cpu - before[kind]) / self.seconds for kind, cpu in self.after.cpu_s.items()}


def look(connection: redis.Redis, processes: Mapping[str, Iterable[psutil.Process]] = {}) -> Look:
    """Reads the counts, and the nonces of the current round."""
    found: Any = connection
    current = found.get(keys.CURRENT_ROUND)
    n_nonces = found.hget(keys.round(current.decode()), "n_processed") if current else None
    cpu, stats = found.info("cpu"), found.info("stats")
    calls = sum(one["calls"] for one in found.info("commandstats").values())
    return Look(
        time.monotonic(),
        cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        calls,
        stats["total_reads_processed"],
        int(n_nonces or 0),
        {kind: sum(map(cpu_s, members)) for kind, members in processes.items()},
    )
