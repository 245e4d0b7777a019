"""The faults of a campaign: each does harm, waits while it lasts, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import redis

from bench.faults.proxy import Mood
from bench.faults.stack import FaultyStack, MovedClock, fill
from cli.supervise.redis_server import wait_for_redis
from tests.integration.processes import engine_cores
from tests.peers.receiver import Receiver

# Most seconds of a fault that lasts: a campaign's workers count as dead after 4 s.
_LONGEST_S = 8.0
# Seconds within which Redis runs again: its supervisor pauses longer after each kill.
_BACK_S = 60.0


@dataclass
class Victims:
    """The parts of a stack that faults harm."""

    stack: FaultyStack
    receiver: Receiver
    clock: MovedClock
    disk: Path | None  # None if the stack has no separate disk
    rng: random.Random

    def redis(self, **options: Any) -> redis.Redis:
        """Returns a client of Redis itself, which may still be restarting after a fault."""
        wait_for_redis(self.stack.own_url, _BACK_S)
        return redis.Redis.from_url(self.stack.own_url, **options)

    def any_pid(self) -> tuple[str, int | None]:
        """Draws a kind of process, then one process of it; returns its name and pid."""
        kind = self.rng.choice(["worker", "worker", "api", "courier", "redis"])
        # All processes of the kind may be between two starts.
        child = self.rng.choice(self.stack.children(kind) or self.stack.children())
        return child.spec.name, child.pid


Fault = Callable[[Victims], str]
"""Does the harm and describes it in a few words."""


def lasting(harm: Callable[[Victims], Iterator[str]]) -> Fault:
    """Decorator that makes a fault of a generator.

    The generator does the harm, yields its description, and is resumed after some seconds to undo
    the harm.
    """

    @functools.wraps(harm)
    def fault(victims: Victims) -> str:
        seconds = victims.rng.uniform(1, _LONGEST_S)
        with contextmanager(harm)(victims) as what:
            time.sleep(seconds)
        return f"{what} for {seconds:.1f} s"

    return fault


def kill(victims: Victims) -> str:
    name, pid = victims.any_pid()
    _signal(pid, signal.SIGKILL)
    return f"SIGKILL of {name}"


def terminate(victims: Victims) -> str:
    name, pid = victims.any_pid()
    _signal(pid, signal.SIGTERM)
    return f"SIGTERM of {name}"


def kill_engine(victims: Victims) -> str:
    # A synthetic engine runs in its worker.
    workers = victims.stack.children("worker") or victims.stack.children()
    victim = victims.rng.choice([*engine_cores(os.getpid())] or workers)
    _signal(victim.pid, signal.SIGKILL)
    return "SIGKILL of an engine"


@lasting
def stand_still(victims: Victims) -> Iterator[str]:
    name, pid = victims.any_pid()
    _signal(pid, signal.SIGSTOP)
    yield f"SIGSTOP of {name}"
    _signal(pid, signal.SIGCONT)


def cut_connections(victims: Victims) -> str:
    times = victims.rng.randint(1, 5)
    for _ in range(times):
        victims.stack.proxy.cut()
        time.sleep(0.3)
    return f"all connections to Redis cut, {times} times"


@contextmanager
def _network(victims: Victims, mood: Mood) -> Iterator[None]:
    proxy = victims.stack.proxy
    with patch.object(proxy, "mood", mood):
        yield
    if mood != "delay":  # connections that hung or lost packets are of no further use
        proxy.cut()


@lasting
def slow_network(victims: Victims) -> Iterator[str]:
    proxy = victims.stack.proxy
    proxy.delay_s = victims.rng.choice([0.01, 0.05, 0.2])
    with _network(victims, "delay"):
        yield f"every packet to and from Redis {proxy.delay_s * 1000:.0f} ms late"


@lasting
def silent_network(victims: Victims) -> Iterator[str]:
    with _network(victims, "hang"):
        yield "no packet to or from Redis"


@lasting
def halved_packets(victims: Victims) -> Iterator[str]:
    with _network(victims, "halve"):
        yield "connections to Redis end in the middle of a packet"


@lasting
def receiver_refuses(victims: Victims) -> Iterator[str]:
    status = victims.rng.choice([500, 503, 429, 302, 404])
    with patch.object(victims.receiver, "status", status):
        yield f"receiver answers {status}"


@lasting
def receiver_talks_nonsense(victims: Victims) -> Iterator[str]:
    """The receiver accepts payloads, but its answers are not HTTP."""
    with patch.object(victims.receiver, "talks_nonsense", True):
        yield "receiver talks nonsense"


@lasting
def receiver_is_slow(victims: Victims) -> Iterator[str]:
    with patch.object(victims.receiver, "delay_s", victims.rng.uniform(0.5, 3)):
        yield "receiver is slow"


@lasting
def receiver_is_away(victims: Victims) -> Iterator[str]:
    victims.receiver.go_away()
    yield "receiver away"
    victims.receiver.come_back()


@contextmanager
def _memory_used_up(victims: Victims) -> Iterator[None]:
    with victims.redis() as connection:
        connection.config_set("maxmemory", 1_000_000)
        try:
            yield
        finally:
            connection.config_set("maxmemory", 0)


@lasting
def no_memory(victims: Victims) -> Iterator[str]:
    """Redis refuses writes, as it does when an operator's `maxmemory` is reached."""
    with _memory_used_up(victims):
        yield "Redis out of memory"


@lasting
def full_disk(victims: Victims) -> Iterator[str]:
    # A disk that Redis has already filled would stay full.
    if victims.disk is None or shutil.disk_usage(victims.disk).free < 2**28:
        with _memory_used_up(victims):
            yield "Redis out of memory"
        return
    filler = fill(victims.disk)
    yield "disk full"
    filler.unlink()


@lasting
def clocks_jump(victims: Victims) -> Iterator[str]:
    ahead_s = victims.rng.choice([-3600.0, -60.0, -5.0, 5.0, 60.0, 3600.0])
    victims.clock.set(ahead_s)
    yield f"clocks {ahead_s:+.0f} s"
    victims.clock.set(0)


@lasting
def bad_records(victims: Victims) -> Iterator[str]:
    """Records that anybody with a worker's Redis password could write."""
    bad = [b"\xff\xfe", "{", "null", "1e999", "[" * 5000, '{"id": 7}']
    # (index, name of the bad record in the index, key of the record)
    listed = [
        ("poc:workers", "bad-worker", "poc:worker:bad-worker"),
        ("poc:hosts", "bad-host", "poc:host:bad-host"),
        ("poc:outbox:due", "bad-outbox", "poc:outbox:bad-outbox"),
        ("poc:receivers", "bad:1", "poc:receiver:bad:1"),
        (f"poc:jobs:active:{victims.stack.model_name}", "bad-job", "poc:job:bad-job"),
    ]
    names = ("state", "status", "url", "report", "record", "in_hand", "generation")
    with victims.redis() as connection:
        for index, name, key in listed:
            if victims.rng.random() < 0.5:
                connection.set(key, victims.rng.choice(bad), ex=60)
            else:
                connection.hset(key, mapping={field: victims.rng.choice(bad) for field in names})
                connection.expire(key, 60)
            connection.zadd(index, {name: 1.0})
        connection.hset("poc:models", "bad-model", victims.rng.choice(bad))
        yield "bad records"
        for index, name, key in listed:
            connection.zrem(index, name)
            connection.delete(key)
        connection.hdel("poc:models", "bad-model")


def bad_messages(victims: Victims) -> str:
    """Messages that are not Celery's, or name a task that does not exist."""
    none_such = json.dumps({"body": "W10=", "headers": {}, "properties": {}})
    bad = [b"\xff", "{", "[]", "null", "1e999", "[" * 100_000, none_such]
    with victims.redis() as connection:
        workers = connection.zrange("poc:workers", 0, -1)
        queues = [f"poc.worker.{name.decode()}" for name in workers]
        queues.append(f"poc.model.{victims.stack.model_name}")
        for _ in range(10):
            connection.lpush(victims.rng.choice(queues), victims.rng.choice(bad))
        for queue in queues:
            connection.expire(queue, 3600)
    return "ten bad messages"


def busy_script(victims: Victims) -> str:
    """A script that runs until the API kills it."""
    began = time.monotonic()
    # The campaign itself notices a late kill, because it waits for work to go on.
    with contextlib.suppress(redis.RedisError), victims.redis(socket_timeout=60) as connection:
        connection.eval("while true do end", 0)
    return f"a script without end, which lasted {time.monotonic() - began:.1f} s"


@lasting
def few_descriptors(victims: Victims) -> Iterator[str]:
    """A process cannot open more files or connections than it has open."""
    name, pid = victims.any_pid()
    process, limits = None, (0, 0)
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        process = psutil.Process(pid or 0)
        limits = process.rlimit(psutil.RLIMIT_NOFILE)
        highest = max(int(one.name) for one in Path(f"/proc/{process.pid}/fd").iterdir())
        process.rlimit(psutil.RLIMIT_NOFILE, (highest + 1, limits[1]))
    yield f"no further files for {name}"
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if process is not None:
            process.rlimit(psutil.RLIMIT_NOFILE, limits)


# Drawn from evenly, so a fault that is listed twice is twice as likely.
FAULTS: tuple[Fault, ...] = (
    *(kill, kill, kill, terminate, kill_engine, stand_still, stand_still),
    *(cut_connections, slow_network, silent_network, halved_packets),
    *(receiver_refuses, receiver_talks_nonsense, receiver_is_slow, receiver_is_away),
    *(no_memory, full_disk, clocks_jump, bad_records, bad_messages, busy_script, few_descriptors),
)


def _signal(pid: int | None, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        psutil.Process(pid or 0).send_signal(number)
