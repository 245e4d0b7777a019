"""What Redis and processes count: looks at them, and what happened between two."""

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
    """Counts since some start. CPU in seconds."""

    at: float  # time.monotonic()
    redis_cpu_s: float
    calls: Mapping[str, int]  # of each command, those within scripts too
    reads: int  # requests that Redis took from sockets, about
    n_nonces: int
    cpu_s: Mapping[str, float]  # by kind of process


@dataclass(frozen=True)
class Stretch:
    """What happened between two looks."""

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
        """Those within scripts too."""
        return sum(self.calls.values()) / self.seconds

    @property
    def reads_per_s(self) -> float:
        return (self.after.reads - self.before.reads) / self.seconds

    @property
    def calls(self) -> dict[str, int]:
        """Of each command."""
        before = self.before.calls
        return {name: n - before.get(name, 0) for name, n in self.after.calls.items()}

    @property
    def cores(self) -> dict[str, float]:
        """By kind of process."""
        before = self.before.cpu_s
        return {kind: (cpu - before[kind]) / self.seconds for kind, cpu in self.after.cpu_s.items()}


def look(connection: redis.Redis, processes: Mapping[str, Iterable[psutil.Process]] = {}) -> Look:
    """What has been counted by now; nonces of the current round."""
    found: Any = connection
    current = found.get(keys.CURRENT_ROUND)
    n_nonces = found.hget(keys.round(current.decode()), "n_processed") if current else None
    cpu, stats = found.info("cpu"), found.info("stats")
    calls = {
        name.removeprefix("cmdstat_"): told["calls"]
        for name, told in found.info("commandstats").items()
    }
    return Look(
        time.monotonic(),
        cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        calls,
        stats["total_reads_processed"],
        int(n_nonces or 0),
        {kind: sum(map(cpu_s, members)) for kind, members in processes.items()},
    )
