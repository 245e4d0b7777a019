"""A whole node behind Sentinels: under kills, and over TLS with users of their own."""

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from bench.faults.failover import run
from cli.supervise import redis_server
from cli.supervise.processes import command_of_proofline
from cli.supervise.redis_server import free_port
from tests.certificates import make_certificate
from tests.harness.waiting import wait_until
from tests.integration.node import run_node, synthetic_artifacts
from tests.stacks.round_client import FAST
from tests.stacks.sentinels import ASKER, sentinels
from tests.stacks.tls_redis import binary_with_tls
from tests.stacks.up import environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]

READY_S = 300.0
# For Redis: a user who is not the operator.
NODE = "user node on >of-the-node ~* &* +@all"


def test_three_primaries_killed_under_rounds_jobs_and_chat() -> None:
    """`make failover` is longer, and asks for the seconds too."""
    report = run(kills=3, minutes=1.5, seed=1, forget_s=0.0, log=print, most_s=120.0)
    assert report.problems == []
    assert len(report.recoveries_s) == 3
    assert report.counts["jobs completed"] > 0
    assert report.counts["nonces of rounds computed again"] > 0


def test_what_replicas_had_not_yet_is_computed_again_and_counted_once() -> None:
    report = run(kills=2, minutes=1.0, seed=1, forget_s=1.0, log=print, most_s=120.0)
    assert report.problems == []
    assert report.counts["nonces of rounds computed again"] > 0


def test_over_tls_with_users_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = binary_with_tls()
    monkeypatch.setattr(redis_server, "find_redis_server", lambda: Path(binary))
    monkeypatch.setattr("tests.stacks.sentinels.find_redis_server", lambda: Path(binary))
    tls = make_certificate(tmp_path, "redis")
    (tmp_path / "password").write_text("of-the-asker\n")
    with ExitStack() as exits:
        running = exits.enter_context(
            sentinels(tmp_path, own=[NODE], sentinel_own=[ASKER], tls=tls)
        )
        url = running.url_of(
            "node",
            "of-the-node",
            f"ssl_ca_certs={tls[0]}&sentinel_username=asker"
            f"&sentinel_password_file={tmp_path / 'password'}",
        )
        node = run_node(exits, workers=1, synthetic_step_ms=5, env=FAST, redis_url=url)
        port = free_port()
        flower = subprocess.Popen(
            command_of_proofline("flower", "--port", str(port)),
            env=environment({"POC_REDIS_URL": url, "FLOWER_BASIC_AUTH": "me:a password"})
            | {"PATH": os.environ["PATH"]},
        )
        exits.callback(flower.wait, 30)
        exits.callback(flower.terminate)
        http = exits.enter_context(
            httpx.Client(
                base_url=f"http://127.0.0.1:{port}", auth=("me", "a password"), trust_env=False
            )
        )

        def is_seen() -> bool:
            try:
                http.get("/api/workers", params={"refresh": "1"})
                found = http.get("/api/queues/length").json().get("active_queues", [])
            except (httpx.TransportError, ValueError):  # not yet there, or Redis is away
                return False
            return {"name": "poc.model.tiny-qwen3", "messages": 0} in found

        for first in (0, 100):
            nonces = range(first, first + 64)
            assert node.result(node.submit(nonces))["artifacts"] == synthetic_artifacts(nonces)
            wait_until(is_seen, "the queue in Flower", READY_S, 0.5)
            shown = http.get("/broker").text
            assert "of-the-" not in shown
            if first == 0:
                running.kill_primary()
                wait_until(lambda: node.http.get("/readyz").status_code == 200, "the node", READY_S)
