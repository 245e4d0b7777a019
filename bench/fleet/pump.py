"""Leases and completions of a round as fast as one machine asks for them, without workers around.

`python -m bench.fleet.pump` is one process with a connection for each worker id, and with no more
threads for a large fleet than for a small one: what clients take is not Redis' matter. The
calls are those of a worker (`RoundStore`, `WorkerRegistry`), the values made up beforehand. So
Redis has as much to do as with a fleet, and the CPU time of a batch is that of a busy Redis, which
takes many requests with each look at its sockets.
"""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import redis
from pydantic import BaseModel, JsonValue

from bench.fleet.centre import MODEL, centre, start_round
from bench.fleet.figures import Stretch, look
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
HELD = 2  # leases that a worker has in hand


class Order(BaseModel):
    redis_url: str
    first: int  # number of the first worker
    workers: int
    batch: int  # nonces
    seconds: float
    pace: float | None = None  # batches a second of each worker; None: as fast as may be


def in_turns(fleets: Sequence[int], batch: int, seconds: float) -> dict[int, Stretch]:
    """By number of workers the window with the median of a batch's CPU time.

    Each has its turn three times: a machine that others use too is not the same minutes later.
    """
    seen: dict[int, list[Stretch]] = {n: [] for n in fleets}
    for _ in range(TURNS):
        for n in fleets:
            # A window without nonces, on a machine that stood still, has no cost of one.
            seen[n] += [one for one in _measure(n, batch, seconds / TURNS) if one.n_nonces]
    return {n: _median(n, windows) for n, windows in seen.items()}


def _median(n: int, windows: Sequence[Stretch]) -> Stretch:
    """RuntimeError: there are none."""
    if not windows:
        raise RuntimeError(f"{n} workers computed nothing; the machine is too busy to measure it")
    ordered = sorted(windows, key=lambda one: one.redis_cores * one.seconds / one.n_nonces)
    return ordered[len(ordered) // 2]


def _measure(n: int, batch: int, seconds: float) -> list[Stretch]:
    """Batches of `n` workers, in windows."""
    with centre() as node, redis.Redis.from_url(str(node.redis_url)) as connection:
        start_round(str(node.redis_url), batch, "http://127.0.0.1:9")  # nobody listens there
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
    """Processes that are `n` workers together, for so long."""
    each = n // PROCESSES
    processes = []
    for index in range(PROCESSES):
        order = Order(
            redis_url=redis_url,
            first=each * index,
            workers=each,
            batch=batch,
            seconds=seconds,
            pace=pace,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.fleet.pump"], stdin=subprocess.PIPE
        )
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
    """A worker id with a connection of its own."""

    def __init__(self, order: Order, number: int) -> None:
        settings = load_settings(redis_url=order.redis_url)
        own = connect(settings)
        worker_id = f"pump{number:03}/gpu0-{number:06x}"
        self._store, self._registry = (
            WorkStore(own, settings, worker_id),
            WorkerRegistry(own, settings),
        )
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
        """A batch that is done, and the next one."""
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
