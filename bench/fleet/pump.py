"""Leases and completions of a round as fast as one machine asks for them, without workers around.

`python -m bench.fleet.pump` is one process with a thread and a connection for each worker id. The
calls are those of a worker (`RoundStore`, `WorkerRegistry`), the values made up beforehand. So
Redis has as much to do as with a fleet, and the CPU time of a batch is that of a busy Redis, which
takes many requests with each look at its sockets.
"""

import subprocess
import sys
import threading
import time

import redis
from pydantic import BaseModel, JsonValue

from bench.fleet.centre import MODEL, centre, start_round
from bench.fleet.figures import Stretch, look
from bench.harness import machine
from poc_core.records import Lease, WorkerRecord
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore

PROCESSES = 2
SETTLE_S = 4.0
WINDOW_S = 2.0  # of the measurement, of which the quietest count
BEAT_S = 2.0
HELD = 2  # leases that a worker has in hand


class Order(BaseModel):
    redis_url: str
    first: int  # number of the first worker
    workers: int
    batch: int  # nonces
    seconds: float
    pace: float | None = None  # batches a second of each worker; None: as fast as may be


def measure(n: int, batch: int, seconds: float) -> Stretch:
    """Batches of `n` workers in the window in which other programs used least CPU."""
    with centre() as node, redis.Redis.from_url(str(node.redis_url)) as connection:
        start_round(str(node.redis_url), batch, "http://127.0.0.1:9")  # nobody listens there
        processes = start(str(node.redis_url), n, batch, seconds + 2 * SETTLE_S)
        time.sleep(SETTLE_S)
        seen: list[tuple[float, Stretch]] = []
        for _ in range(max(1, round(seconds / WINDOW_S))):
            meter, before = machine.UsageMeter(), look(connection)
            time.sleep(WINDOW_S)
            seen.append((meter.read().others, Stretch(before, look(connection))))
        for process in processes:
            process.wait()
    return min(seen, key=lambda one: one[0])[1]


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
    threads = [
        threading.Thread(target=_work, args=(order, order.first + index, until))
        for index in range(order.workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(order: Order, number: int, until: float) -> None:
    settings = load_settings(redis_url=order.redis_url)
    with connect(settings) as own:
        rounds, registry = RoundStore(own, settings), WorkerRegistry(own, settings)
        record = rounds.current()
        assert record is not None
        worker = WorkerRecord(
            id=f"pump{number:03}/gpu0-{number:06x}",
            model=MODEL,
            engine="none",
            host="pump",
            pid=0,
            state="ready",
            started_at=time.time(),
        )
        values: list[JsonValue] = ["A" * 32] * order.batch
        held: list[Lease] = []
        beat_at, next_at = 0.0, time.monotonic()
        while (now := time.monotonic()) < until:
            if order.pace is not None:
                time.sleep(max(0.0, next_at - now))
                next_at += 1 / order.pace
            if now >= beat_at:
                registry.heartbeat(worker)
                beat_at = now + BEAT_S
            if len(held) < HELD:
                lease = rounds.lease(record, worker.id, order.batch, held)
            else:
                done = held.pop(0)
                _, lease = rounds.turn(done, values, record, worker.id, order.batch, held)
            assert isinstance(lease, Lease), lease
            held.append(lease)
        for lease in held:
            rounds.release(lease, worker.id)


if __name__ == "__main__":
    run(Order.model_validate_json(sys.stdin.read()))
