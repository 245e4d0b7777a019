"""What tens of thousands of one-nonce jobs do to the rest of a node.

    .venv/bin/python -m bench.many_jobs

Two synthetic workers get far more jobs than they can compute. Meanwhile heartbeats must come in
time, and /metrics, /status and /stop must answer soon.
"""

import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import httpx
import redis
import typer

from bench.harness.heartbeats import HEARTBEAT_LIMIT_S, HeartbeatWatch
from bench.harness.node import API, MODEL, body_of, running
from bench.harness.report import at_most, judged, measures, run, say
from cli.supervise.stack import Stack
from poc_core.queues import model_queue
from workers.engines.options import EngineOptions

# Milliseconds of a micro-batch: nearly all jobs still wait when the last job has been sent.
STEP_MS = 1000.0
CLIENTS = 8
ANSWER_LIMIT_S = 1.0


@measures
def main(
    jobs: Annotated[int, typer.Option(min=1, help="One-nonce jobs.")] = 20_000,
    workers: Annotated[int, typer.Option(min=1, help="Workers with the synthetic engine.")] = 2,
    watch_s: Annotated[
        float, typer.Option(min=0, help="Seconds of measuring once all jobs wait.")
    ] = 30.0,
) -> bool:
    """Exits with 1 when heartbeats are more than 5 s apart or an answer takes more than 1 s."""
    env = {"POC_MAX_QUEUED_NONCES": str(max(100_000, 5 * jobs))}
    options = EngineOptions(model=MODEL, engine="synthetic", synthetic_step_ms=STEP_MS)
    with running(Stack(options, workers=workers, env=env)) as (stack, client):
        watch = HeartbeatWatch(str(stack.redis_url))
        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            codes = Counter(pool.map(lambda nonce: submit(client, nonce), range(jobs)))
        say(f"{jobs} jobs, {workers} workers: {dict(codes)} in {time.monotonic() - began:.1f} s")
        scrapes: list[float] = []
        statuses: list[float] = []
        until = time.monotonic() + watch_s
        while time.monotonic() < until or not scrapes:
            scrapes.append(timed(client, "GET", "/metrics"))
            statuses.append(timed(client, "GET", f"{API}/status"))
            time.sleep(1)
        stop_s = timed(client, "POST", f"{API}/stop")
        with redis.Redis.from_url(str(stack.redis_url)) as connection:
            left: Any = connection.llen(model_queue(MODEL))
        time.sleep(3)
        gap_s = watch.close()
    say(f"/metrics: median {statistics.median(scrapes):.3f} s")
    return all(
        [
            at_most("longest gap of heartbeats, s", gap_s, HEARTBEAT_LIMIT_S, ".2f"),
            at_most("longest /metrics, s", max(scrapes), ANSWER_LIMIT_S),
            at_most("longest /status, s", max(statuses), ANSWER_LIMIT_S),
            at_most("/stop, s", stop_s, ANSWER_LIMIT_S),
            judged(left == 0, f"messages left after /stop: {left}"),
        ]
    )


def submit(client: httpx.Client, nonce: int) -> int:
    """Sends a job and returns the status of the answer."""
    return client.post(f"{API}/generate", json=body_of(MODEL, 256, nonces=[nonce])).status_code


def timed(client: httpx.Client, method: str, path: str) -> float:
    """Returns the seconds until the complete answer has arrived."""
    began = time.monotonic()
    client.request(method, path).raise_for_status()
    return time.monotonic() - began


if __name__ == "__main__":
    run(main)
