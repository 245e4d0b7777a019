"""What the node says of its health, to the network and to supervisors."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from tests.harness.samples import MODEL

Serve = Callable[..., Any]


def test_with_a_worker_that_is_ready_all_is_well(client: TestClient, serve: Serve) -> None:
    serve("w1")
    for path in ("/health", "/livez"):
        assert (client.get(path).status_code, client.get(path).json()) == (200, {"status": "ok"})
    for path in ("/ready", "/readyz"):
        assert client.get(path).json() == {"status": "ready", "models": [MODEL]}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (None, "none is started yet"),
        ("starting", "still load their model"),
        ("draining", ""),
        ("hung", "engine hangs"),
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
