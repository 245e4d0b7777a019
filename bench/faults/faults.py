"""The faults of a campaign: each does harm, waits while it lasts, and leaves nothing."""

from __future__ import annotations

import contextlib
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

import psutil
import redis

from bench.faults.stack import FaultyStack, MovedClock, fill
from cli.supervise.redis_server import wait_for_redis
from tests.integration.processes import engine_cores
from tests.peers.receiver import Receiver

# Seconds that anything stands still or is away, at most: heartbeats of a campaign last 4 s.
_LONGEST_S = 8.0
# Within which Redis is there again: its supervisor pauses for longer each time that it is killed.
_BACK_S = 60.0


@dataclass
class Victims:
    """All that faults may be done to."""

    stack: FaultyStack
    receiver: Receiver
    clock: MovedClock
    disk: Path | None  # None: no disk of its own
    rng: random.Random

    def redis(self, **options: Any) -> redis.Redis:
        """A client of Redis itself, which may be about to come back from the fault before."""
        wait_for_redis(self.stack.own_url, _BACK_S)
        return redis.Redis.from_url(self.stack.own_url, **options)

    def any_pid(self) -> tuple[str, int | None]:
        """A process of the stack: each kind as likely as another, and each one of a kind."""
        kind = self.rng.choice(["worker", "worker", "api", "courier", "redis"])
        # The kind may be between two starts.
        child = self.rng.choice(self.stack.children(kind) or self.stack.children())
        return child.spec.name, child.pid


Fault = Callable[[Victims], str]
"""Does the fault's harm and says what, in a few words."""


def kill(victims: Victims) -> str:
    name, pid = victims.any_pid()
    _signal(pid, signal.SIGKILL)
    return f"SIGKILL of {name}"


def terminate(victims: Victims) -> str:
    name, pid = victims.any_pid()
    _signal(pid, signal.SIGTERM)
    return f"SIGTERM of {name}"


def kill_engine(victims: Victims) -> str:
    cores = engine_cores(os.getpid())
    if not cores:  # a synthetic engine is in its worker
        child = victims.rng.choice(victims.stack.children("worker") or victims.stack.children())
        _signal(child.pid, signal.SIGKILL)
        return f"SIGKILL of {child.spec.name}"
    core = victims.rng.choice(cores)
    _signal(core.pid, signal.SIGKILL)
    return "SIGKILL of an engine"


def stand_still(victims: Victims) -> str:
    name, pid = victims.any_pid()
    seconds = victims.rng.uniform(0.5, _LONGEST_S)
    _signal(pid, signal.SIGSTOP)
    time.sleep(seconds)
    _signal(pid, signal.SIGCONT)
    return f"SIGSTOP of {name} for {seconds:.1f} s"


def cut_connections(victims: Victims) -> str:
    times = victims.rng.randint(1, 5)
    for _ in range(times):
        victims.stack.proxy.cut()
        time.sleep(0.3)
    return f"all connections to Redis cut, {times} times"


def slow_network(victims: Victims) -> str:
    with _proxy(victims, "delay") as seconds:
        return (
            f"every packet to and from Redis {victims.stack.proxy.delay_s * 1000:.0f} ms late for"
            f" {seconds:.1f} s"
        )


def silent_network(victims: Victims) -> str:
    with _proxy(victims, "hang") as seconds:
        return f"no packet to or from Redis for {seconds:.1f} s"


def halved_packets(victims: Victims) -> str:
    with _proxy(victims, "halve") as seconds:
        return f"connections to Redis end in the middle of a packet for {seconds:.1f} s"


def receiver_refuses(victims: Victims) -> str:
    status = victims.rng.choice([500, 503, 429, 302, 404])
    seconds = victims.rng.uniform(1, _LONGEST_S)
    victims.receiver.status = status
    time.sleep(seconds)
    victims.receiver.status = 200
    return f"receiver answers {status} for {seconds:.1f} s"


def receiver_talks_nonsense(victims: Victims) -> str:
    """The receiver takes what it is sent, and answers what nobody can read."""
    seconds = victims.rng.uniform(1, _LONGEST_S)
    victims.receiver.talks_nonsense = True
    time.sleep(seconds)
    victims.receiver.talks_nonsense = False
    return f"receiver talks nonsense for {seconds:.1f} s"


def receiver_is_slow(victims: Victims) -> str:
    seconds = victims.rng.uniform(1, _LONGEST_S)
    victims.receiver.delay_s = victims.rng.uniform(0.5, 3)
    time.sleep(seconds)
    victims.receiver.delay_s = 0.0
    return f"receiver is slow for {seconds:.1f} s"


def receiver_is_away(victims: Victims) -> str:
    seconds = victims.rng.uniform(1, _LONGEST_S)
    victims.receiver.go_away()
    time.sleep(seconds)
    victims.receiver.come_back()
    return f"receiver away for {seconds:.1f} s"


def no_memory(victims: Victims) -> str:
    """Redis refuses writes for want of memory, as an operator's `maxmemory` would make it."""
    seconds = victims.rng.uniform(1, _LONGEST_S)
    with victims.redis() as connection:
        connection.config_set("maxmemory", 1_000_000)
        try:
            time.sleep(seconds)
        finally:
            connection.config_set("maxmemory", 0)
    return f"Redis out of memory for {seconds:.1f} s"


def full_disk(victims: Victims) -> str:
    # A disk that is really full would stay so.
    if victims.disk is None or shutil.disk_usage(victims.disk).free < 2**28:
        return no_memory(victims)
    seconds = victims.rng.uniform(1, _LONGEST_S)
    filler = fill(victims.disk)
    time.sleep(seconds)
    filler.unlink()
    return f"disk full for {seconds:.1f} s"


def clocks_jump(victims: Victims) -> str:
    ahead_s = victims.rng.choice([-3600.0, -60.0, -5.0, 5.0, 60.0, 3600.0])
    seconds = victims.rng.uniform(1, _LONGEST_S)
    victims.clock.set(ahead_s)
    time.sleep(seconds)
    victims.clock.set(0)
    return f"clocks {ahead_s:+.0f} s for {seconds:.1f} s"


def bad_records(victims: Victims) -> str:
    """What whoever has a worker's password of Redis might write beside the true records."""
    seconds = victims.rng.uniform(1, _LONGEST_S)
    bad = [b"\xff\xfe", "{", "null", "1e999", "[" * 5000, '{"id": 7}']
    # (index, its name for the bad record, the record's key)
    listed = [
        ("poc:workers", "bad-worker", "poc:worker:bad-worker"),
        ("poc:hosts", "bad-host", "poc:host:bad-host"),
        ("poc:outbox:due", "bad-outbox", "poc:outbox:bad-outbox"),
        ("poc:receivers", "bad:1", "poc:receiver:bad:1"),
        (f"poc:jobs:active:{victims.stack.model_name}", "bad-job", "poc:job:bad-job"),
    ]
    with victims.redis() as connection:
        for index, name, key in listed:
            if victims.rng.random() < 0.5:
                connection.set(key, victims.rng.choice(bad), ex=60)
            else:
                told = ("state", "status", "url", "report", "record", "in_hand", "generation")
                fields = {field: victims.rng.choice(bad) for field in told}
                connection.hset(key, mapping=fields)
                connection.expire(key, 60)
            connection.zadd(index, {name: 1.0})
        connection.hset("poc:models", "bad-model", victims.rng.choice(bad))
        time.sleep(seconds)
        for index, name, key in listed:
            connection.zrem(index, name)
            connection.delete(key)
        connection.hdel("poc:models", "bad-model")
    return f"bad records for {seconds:.1f} s"


def bad_messages(victims: Victims) -> str:
    """Messages that are none of Celery's, or name what is none of Proofline's."""
    none_such = json.dumps({"body": "W10=", "headers": {}, "properties": {}})
    bad = [b"\xff", "{", "[]", "null", "1e999", "[" * 100_000, none_such]
    with victims.redis() as connection:
        queues = [f"poc.model.{victims.stack.model_name}"]
        workers = connection.zrange("poc:workers", 0, -1)
        queues += [f"poc.worker.{name.decode()}" for name in workers]
        for _ in range(10):
            connection.lpush(victims.rng.choice(queues), victims.rng.choice(bad))
        for queue in queues:
            connection.expire(queue, 3600)
    return "ten bad messages"


def busy_script(victims: Victims) -> str:
    """A script that does not end, until the API has it killed."""
    began = time.monotonic()
    # What cuts this connection, or is slow to kill, is the campaign's to tell: it waits for work.
    with (
        contextlib.suppress(redis.RedisError),
        victims.redis(socket_timeout=60) as connection,
    ):
        connection.eval("while true do end", 0)
    return f"a script without end, which lasted {time.monotonic() - began:.1f} s"


def few_descriptors(victims: Victims) -> str:
    """A process may open no more files or connections than it has open."""
    name, pid = victims.any_pid()
    seconds = victims.rng.uniform(1, _LONGEST_S)
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        process = psutil.Process(pid or 0)
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        highest = max(int(one.name) for one in Path(f"/proc/{process.pid}/fd").iterdir())
        process.rlimit(psutil.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            time.sleep(seconds)
        finally:
            process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    return f"no further files for {name} for {seconds:.1f} s"


FAULTS: tuple[Fault, ...] = (
    kill,
    kill,
    kill,
    terminate,
    kill_engine,
    stand_still,
    stand_still,
    cut_connections,
    slow_network,
    silent_network,
    halved_packets,
    receiver_refuses,
    receiver_talks_nonsense,
    receiver_is_slow,
    receiver_is_away,
    no_memory,
    full_disk,
    clocks_jump,
    bad_records,
    bad_messages,
    busy_script,
    few_descriptors,
)


@contextmanager
def _proxy(victims: Victims, mood: str) -> Iterator[float]:
    seconds = victims.rng.uniform(1, _LONGEST_S)
    victims.stack.proxy.delay_s = victims.rng.choice([0.01, 0.05, 0.2])
    victims.stack.proxy.mood = mood  # type: ignore[assignment]
    try:
        time.sleep(seconds)
    finally:
        victims.stack.proxy.mood = "pass"
        if mood != "delay":  # what hung or lost half of it is of no use any more
            victims.stack.proxy.cut()
    yield seconds


def _signal(pid: int | None, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        psutil.Process(pid or 0).send_signal(number)
