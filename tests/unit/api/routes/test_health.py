"""What the node says of its health, to the network and to supervisors."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from poc_core.records import SILENT_S
from poc_core.settings import Settings
from tests.harness.samples import MODEL

Serve = Callable[..., Any]


def test_with_a_worker_that_is_ready_all_is_well(client: TestClient, serve: Serve) -> None:
    serve("w1")
    for path in ("/health", "/livez"):
        assert (client.get(path).status_code, client.get(path).json()) == (200, {"status": "ok"})
    for path in ("/ready", "/readyz"):
        found = client.get(path).json()
        assert (found["status"], found["models"]) == ("ready", [MODEL])
        assert (found["health"]["level"], found["health"]["reasons"]) == ("ok", [])


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (None, "none is started yet"),
        ("starting", "load"),
        ("draining", ""),
        ("hung", "hangs"),
    ],
)
def test_without_one_the_process_lives_and_nothing_can_answer(
    client: TestClient, serve: Serve, redis: Redis, state: str | None, why: str
) -> None:
    redis.flushall()
    if state is not None:
        serve("w1", state=state)
    for path in ("/health", "/ready", "/readyz"):
        answer = client.get(path)
        assert (answer.status_code, int(answer.headers["Retry-After"]) > 0) == (503, True)
        assert why in answer.json()["detail"]
    assert client.get("/livez").status_code == 200


def test_one_worker_that_is_ready_beside_one_that_hangs_is_enough(
    client: TestClient, serve: Serve
) -> None:
    serve("w1", state="hung")
    serve("w2")
    assert client.get("/health").status_code == 200


def test_readiness_ends_with_the_last_sign_of_life(
    client: TestClient, serve: Serve, redis: Redis, settings: Settings
) -> None:
    serve("w1")
    serve("w2")
    redis.pexpire("poc:worker:w1", int(1000 * (settings.worker_ttl_s - SILENT_S)))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["health"]["level"]) == (200, "degraded")
    redis.pexpire("poc:worker:w2", int(1000 * (settings.worker_ttl_s - SILENT_S)))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["health"]["level"]) == (503, "down")
    assert "0 of 2 workers ready" in answer.json()["detail"]
    health = client.get("/api/v1/pow/status").json()["health"]
    assert (health["level"], health["workers_ready"]) == ("down", 0)
    assert client.get("/api/v1/inference/up/status").json()["health"]["level"] == "down"
    assert 'proofline_health{level="down"} 1.0' in client.get("/metrics").text
