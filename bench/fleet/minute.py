"""A round of a million nonces a minute, through outbox and courier to a receiver.

Leased and completed without engines (`pump.py`). It holds where the round keeps the pace, nothing
piles up, and each nonce comes once.
"""

import json
import time
from contextlib import ExitStack

import httpx
import psutil
import redis

from bench.fleet import pump
from bench.fleet.centre import centre, start_round
from bench.fleet.figures import Stretch, look
from bench.harness import machine
from bench.harness.report import console
from bench.harness.timed_round import Sink

A_MINUTE = 1_000_000
BATCH = 32
WORKERS = 16
SETTLE_S = 12.0  # two intervals between callbacks, and the start
DELIVERY_S = 60.0
LEAST = 0.98  # of the pace
# Seconds' worth of nonces that may wait: two intervals between callbacks, and a payload's way.
MOST_WAITING_S = 12.0


def measure(seconds: float) -> bool:
    nonces_per_s = A_MINUTE / 60
    pace = nonces_per_s / BATCH / WORKERS
    with ExitStack() as exits:
        node, sink = exits.enter_context(centre()), exits.enter_context(Sink("HTTP/1.1"))
        connection = exits.enter_context(redis.Redis.from_url(str(node.redis_url)))
        client = exits.enter_context(httpx.Client(base_url=node.base_url, trust_env=False))
        start_round(str(node.redis_url), BATCH, sink.url)
        started = pump.start(str(node.redis_url), WORKERS, BATCH, seconds + 2 * SETTLE_S, pace)
        time.sleep(SETTLE_S)
        processes = {
            "pump": [psutil.Process(process.pid) for process in started],
            "courier": [psutil.Process(node.courier_pid)],
            "API": [psutil.Process(node.api_pid)],
        }
        meter, before = machine.UsageMeter(), look(connection, processes)
        time.sleep(seconds)
        seen, waits = Stretch(before, look(connection, processes)), _waiting(client)
        others = meter.read().others
        for process in started:
            process.wait()
        client.post("/api/v1/pow/stop", timeout=60).raise_for_status()
        drained_s = _drained_s(client)
        nonces = [one["nonce"] for body in sink.bodies for one in json.loads(body)["artifacts"]]
        n_computed = _processed(client)
    computed = seen.n_nonces / seen.seconds
    lost, repeated = n_computed - len(set(nonces)), len(nonces) - len(set(nonces))
    console.print(
        f"{60 * computed:,.0f} nonces a minute counted, {len(sink.bodies)}"
        f" payloads; {waits:,} waited at the end, gone {drained_s:.1f} s after the"
        f" stop; {lost} lost, {repeated} came twice; other programs used {others:.2f} cores",
        highlight=False,
        soft_wrap=True,
    )
    for kind, cores in {"Redis": seen.redis_cores, **seen.cores}.items():
        of_thousand_ms = 1e6 * cores / max(computed, 1)
        console.print(f"  {kind}: {cores:.2f} cores, {of_thousand_ms:.1f} ms per 1,000 nonces")
    holds = (
        computed >= LEAST * nonces_per_s
        and waits <= MOST_WAITING_S * nonces_per_s
        and lost == repeated == 0
    )
    console.print("[bold green]PASS[/]" if holds else "[bold red]FAIL[/]")
    return holds


def _waiting(client: httpx.Client) -> int:
    return int(_stats(client)["artifacts_waiting"])


def _processed(client: httpx.Client) -> int:
    return int(_stats(client)["total_processed"])


def _stats(client: httpx.Client) -> dict[str, int]:
    answer = client.get("/api/v1/pow/status", timeout=60).raise_for_status()
    stats: dict[str, int] = answer.json()["stats"]
    return stats


def _drained_s(client: httpx.Client) -> float:
    """Seconds until the receiver has everything, and no worker brings more."""
    began, since, seen = time.monotonic(), time.monotonic(), -1
    while time.monotonic() - began < DELIVERY_S:
        n = _processed(client)
        if n != seen or _waiting(client):
            seen, since = n, time.monotonic()
        elif time.monotonic() - since > 1.0:
            break
        time.sleep(0.1)
    return since - began
