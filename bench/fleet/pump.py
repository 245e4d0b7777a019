"""Leases and completions of a round as fast as one machine sends them, without real workers.

`python -m bench.fleet.pump` is one process with a connection for each worker id, and the same few
threads for a fleet of any size. It makes the calls of a worker (`WorkStore`, `WorkerRegistry`) with
constant values. So Redis has as much work as with a fleet, and the CPU time of a batch is that of a
busy Redis, which reads many requests at a time.
"""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import redis
from pydantic import BaseModel, JsonValue

from bench.fleet.centre import centre, start_round
from bench.fleet.figures import Stretch, look
from bench.harness.node import MODEL
from poc_core.records import Lease, WorkerRecord
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.registry import WorkerRegistry
from poc_core.state.work import WorkStore

PROCESSES = 2
THREADS = 8  # of each
SETTLE_S = 4.0
WINDOW_S = 2.0  # of the measurement
TURNS = 3
BEAT_S = 2.0
HELD = 2  # leases that a worker holds


class Order(BaseModel):
    """The part of a fleet that one process is."""

    redis_url: str
    first: int  # number of the first worker
    workers: int
    batch: int  # nonces
    seconds: float
    pace: float | None = None  # batches a second of each worker; None: as fast as possible


def in_turns(fleets: Sequence[int], batch: int, seconds: float) -> dict[int, Stretch]:
    """Returns, for each number of workers, the window with the median CPU time of a batch.

    Fleets take three turns each, because the speed of a shared machine changes within minutes.
    RuntimeError: a fleet computed nothing.
    """
    seen: dict[int, list[Stretch]] = {n: [] for n in fleets}
    for _ in range(TURNS):
        for n in fleets:
            # A window without nonces, on a machine that stood still, has no cost of a batch.
            seen[n] += [one for one in _measure(n, batch, seconds / TURNS) if one.n_nonces]
    medians = {}
    for n, windows in seen.items():
        if not windows:
            raise RuntimeError(f"{n} workers computed nothing; the machine is too busy")
        windows.sort(key=lambda one: one.redis_cores * one.seconds / one.n_nonces)
        medians[n] = windows[len(windows) // 2]
    return medians


def _measure(n: int, batch: int, seconds: float) -> list[Stretch]:
    """Measures the batches of `n` workers in windows."""
    with centre() as node, redis.Redis.from_url(str(node.redis_url)) as connection:
        start_round(str(node.redis_url), batch)
        processes = start(str(node.redis_url), n, batch, seconds + 2 * SETTLE_S)
        time.sleep(SETTLE_S)
        seen = []
        for _ in range(max(1, round(seconds / WINDOW_S))):
            before = look(connection)
            time.sleep(WINDOW_S)
            seen.append(Stretch(before, look(connection)))
        for process in processes:
            process.wait()
    return seen


def start(
    redis_url: str, n: int, batch: int, seconds: float, pace: float | None = None
) -> list[subprocess.Popen[bytes]]:
    """Starts the processes that act as `n` workers for `seconds`."""
    processes = []
    for index in range(PROCESSES):
        first, end = (n * place // PROCESSES for place in (index, index + 1))
        part = {"first": first, "workers": end - first}
        order = Order(redis_url=redis_url, batch=batch, seconds=seconds, pace=pace, **part)
        command = [sys.executable, "-m", "bench.fleet.pump"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(order.model_dump_json().encode())
        process.stdin.close()
        processes.append(process)
    return processes


def run(order: Order) -> None:
    until = time.monotonic() + order.seconds
    numbers = range(order.first, order.first + order.workers)
    threads = [
        threading.Thread(target=_work, args=(order, numbers[index::THREADS], until))
        for index in range(min(THREADS, order.workers))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Worker:
    """A worker id with its own connection."""

    def __init__(self, order: Order, number: int) -> None:
        settings = load_settings(redis_url=order.redis_url)
        own = connect(settings)
        worker_id = f"pump{number:03}/gpu0-{number:06x}"
        self._store = WorkStore(own, settings, worker_id)
        self._registry = WorkerRegistry(own, settings)
        record = self._store.rounds.current()
        assert record is not None
        self._record = record
        self._worker = WorkerRecord(
            id=worker_id,
            model=MODEL,
            engine="none",
            host="pump",
            pid=0,
            state="ready",
            started_at=time.time(),
        )
        self._places = order.batch
        self._values: list[JsonValue] = ["A" * 32] * order.batch
        self._held: list[Lease] = []
        self._beat_at = 0.0

    def turn(self, now: float) -> None:
        """Completes a batch and leases the next one."""
        if now >= self._beat_at:
            self._registry.heartbeat(self._worker, self._store.hand.summary())
            self._beat_at = now + BEAT_S
        done = (self._held.pop(0), self._values) if len(self._held) == HELD else None
        found = self._store.lease(MODEL, round=self._record, places=self._places, done=done)
        assert isinstance(found, list), found
        self._held += found
        if done is not None:
            self._store.hand.drop(done[0].number)

    def leave(self) -> None:
        for lease in self._held:
            self._store.release(lease)


def _work(order: Order, numbers: Sequence[int], until: float) -> None:
    workers = [_Worker(order, number) for number in numbers]
    next_at = time.monotonic()
    for worker in itertools.cycle(workers):
        if (now := time.monotonic()) >= until:
            break
        if order.pace is not None:
            time.sleep(max(0.0, next_at - now))
            next_at += 1 / order.pace / len(workers)
        worker.turn(now)
    for worker in workers:
        worker.leave()


if __name__ == "__main__":
    run(Order.model_validate_json(sys.stdin.read()))
