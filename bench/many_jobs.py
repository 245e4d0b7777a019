"""What tens of thousands of one-nonce jobs do to the rest of a node.

    .venv/bin/python -m bench.many_jobs

Two synthetic workers are given far more jobs than they can do; meanwhile heartbeats must come in
time, and /metrics, /status and /stop must answer soon.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import httpx
import redis
import typer
from rich.table import Table

from bench.harness.heartbeats import HEARTBEAT_LIMIT_S, HeartbeatWatch
from bench.harness.report import console, exit_with
from cli.supervise.stack import Stack
from poc_core.queues import model_queue
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 300.0
MODEL = "tiny-qwen3"  # its name only: the engine loads none
# Milliseconds of a micro-batch: nearly all jobs still wait when the last one has come.
STEP_MS = 1000.0
CLIENTS = 8
ANSWER_LIMIT_S = 1.0


def main(
    jobs: Annotated[int, typer.Option(min=1, help="One-nonce jobs.")] = 20_000,
    workers: Annotated[int, typer.Option(min=1, help="Workers with the synthetic engine.")] = 2,
    watch_s: Annotated[
        float, typer.Option(min=0, help="Seconds to look on once all jobs wait.")
    ] = 30.0,
) -> None:
    """Exits with 1 when heartbeats are more than 5 s apart or an answer takes more than 1 s."""
    exit_with(lambda: measure(jobs, workers, watch_s))


def measure(n_jobs: int, n_workers: int, watch_s: float) -> bool:
    env = {
        "POC_MAX_QUEUED_NONCES": str(max(100_000, 5 * n_jobs)),
    }
    options = EngineOptions(model=MODEL, engine="synthetic", synthetic_step_ms=STEP_MS)
    with Stack(options, workers=n_workers, env=env) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        watch = HeartbeatWatch(str(stack.redis_url))
        limits = httpx.Limits(max_connections=CLIENTS + 2)
        with httpx.Client(
            base_url=stack.base_url, timeout=120, trust_env=False, limits=limits
        ) as client:
            began = time.monotonic()
            with ThreadPoolExecutor(CLIENTS) as pool:
                codes = list(pool.map(lambda nonce: submit(client, nonce), range(n_jobs)))
            submitted_s = time.monotonic() - began
            scrapes: list[float] = []
            until = time.monotonic() + watch_s
            while time.monotonic() < until or not scrapes:
                scrapes.append(timed(client, "GET", "/metrics"))
                statuses_s = timed(client, "GET", "/api/v1/pow/status")
                time.sleep(1)
            stop_s = timed(client, "POST", "/api/v1/pow/stop")
            with redis.Redis.from_url(str(stack.redis_url)) as connection:
                left: Any = connection.llen(model_queue(MODEL))
            time.sleep(3)
        gap_s = watch.close()
    table = Table(title=f"{n_jobs} one-nonce jobs, {n_workers} workers")
    for heading in (
        "accepted",
        "in s",
        "longest heartbeat gap s",
        "/metrics s, median max",
        "/status s",
        "/stop s",
    ):
        table.add_column(heading, justify="right")
    table.add_column("messages left", justify="right")
    table.add_row(
        str(codes.count(200)),
        f"{submitted_s:.1f}",
        f"{gap_s:.2f}",
        f"{statistics.median(scrapes):.3f} {max(scrapes):.3f}",
        f"{statuses_s:.3f}",
        f"{stop_s:.3f}",
        str(left),
    )
    console.print(table)
    refused = {code: codes.count(code) for code in set(codes) - {200}}
    if refused:
        console.print(f"refused: {refused}", highlight=False)
    return (
        gap_s < HEARTBEAT_LIMIT_S
        and max(*scrapes, statuses_s, stop_s) < ANSWER_LIMIT_S
        and left == 0
    )


def submit(client: httpx.Client, nonce: int) -> int:
    answer = client.post(
        "/api/v1/pow/generate",
        json={
            "block_hash": "many-jobs",
            "block_height": 1,
            "public_key": "bench",
            "node_id": 0,
            "node_count": 1,
            "nonces": [nonce],
            "params": {"model": MODEL, "seq_len": 256},
        },
    )
    return answer.status_code


def timed(client: httpx.Client, method: str, path: str) -> float:
    """Seconds until the whole answer was there."""
    began = time.monotonic()
    client.request(method, path).raise_for_status()
    return time.monotonic() - began


if __name__ == "__main__":
    typer.run(main)
