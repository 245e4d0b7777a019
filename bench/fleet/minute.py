"""A round of a million nonces a minute, through outbox and courier to a receiver.

`pump.py` leases and completes the nonces without engines. The round must keep the pace, no backlog
may grow, and each nonce must arrive once.
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
from bench.harness.node import API, stats_of
from bench.harness.report import at_least, at_most, judged, say
from bench.harness.timed_round import Sink

A_MINUTE = 1_000_000
BATCH = 32
WORKERS = 16
SETTLE_S = 12.0  # two intervals between callbacks, and the start
DELIVERY_S = 60.0
LEAST = 0.98  # of the pace
# Most seconds' worth of waiting nonces: two intervals between callbacks, and a payload's delivery.
MOST_WAITING_S = 12.0


def measure(seconds: float) -> bool:
    nonces_per_s = A_MINUTE / 60
    pace = nonces_per_s / BATCH / WORKERS
    with ExitStack() as exits:
        node, sink = exits.enter_context(centre()), exits.enter_context(Sink("HTTP/1.1"))
        connection = exits.enter_context(redis.Redis.from_url(str(node.redis_url)))
        client = exits.enter_context(
            httpx.Client(base_url=node.base_url, timeout=60, trust_env=False)
        )
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
        seen = Stretch(before, look(connection, processes))
        waits, others = stats_of(client)["artifacts_waiting"], meter.read().others
        for process in started:
            process.wait()
        client.post(f"{API}/stop").raise_for_status()
        drained_s = _drained_s(client)
        nonces = [one["nonce"] for body in sink.bodies for one in json.loads(body)["artifacts"]]
        lost = stats_of(client)["total_processed"] - len(set(nonces))
    rate, repeated = seen.n_nonces / seen.seconds, len(nonces) - len(set(nonces))
    say(
        f"{60 * rate:,.0f} nonces a minute, {len(sink.bodies)} payloads, all delivered"
        f" {drained_s:.1f} s after the stop; other programs used {others:.2f} cores"
    )
    for kind, cores in {"Redis": seen.redis_cores, **seen.cores}.items():
        say(f"  {kind}: {cores:.2f} cores, {1e6 * cores / max(rate, 1):.1f} ms per 1,000 nonces")
    most = MOST_WAITING_S * nonces_per_s
    checks = [
        at_least("nonces/s", rate, LEAST * nonces_per_s, ",.0f"),
        at_most("nonces that waited at the end", waits, most, ",.0f"),
        judged(lost == repeated == 0, f"{lost} nonces lost, {repeated} came twice"),
    ]
    return all(checks)


def _drained_s(client: httpx.Client) -> float:
    """Waits until the receiver has everything and workers complete nothing; returns the seconds."""
    began, since, seen = time.monotonic(), time.monotonic(), -1
    while time.monotonic() - began < DELIVERY_S:
        stats = stats_of(client)
        if stats["total_processed"] != seen or stats["artifacts_waiting"]:
            seen, since = stats["total_processed"], time.monotonic()
        elif time.monotonic() - since > 1.0:
            break
        time.sleep(0.1)
    return since - began
