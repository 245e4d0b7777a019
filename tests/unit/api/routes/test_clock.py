"""/api/v1/clock, which the network's prober reads."""

import time
from typing import cast

import fakeredis
import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.app import create_app
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.settings import Settings
from tests.harness.samples import RecordingDispatcher

PATH = "/api/v1/clock"


@pytest.mark.parametrize("path", [PATH, f"/v3.0.16{PATH}"])
def test_it_tells_when_a_request_came_and_when_the_answer_left(
    client: TestClient, path: str
) -> None:
    before = time.time_ns()
    answer = client.get(path)
    after = time.time_ns()
    assert (answer.status_code, answer.content) == (204, b"")
    received, sent = (int(answer.headers[f"X-Server-{what}-Ns"]) for what in ("Recv", "Send"))
    assert before <= received <= sent <= after


def test_it_wants_no_key_and_changes_nothing() -> None:
    redis = fakeredis.FakeRedis()
    services = Services(Settings(), redis, cast(Dispatcher, RecordingDispatcher()))
    with TestClient(create_app(services=services, listens_on="0.0.0.0")) as client:
        assert client.get("/api/v1/state").status_code == 401
        answer = client.get(PATH)
    assert (answer.status_code, redis.keys()) == (204, [])


def test_it_answers_while_redis_is_away() -> None:
    away = Redis(port=1)
    services = Services(Settings(), away, cast(Dispatcher, RecordingDispatcher()))
    with TestClient(create_app(services=services)) as client:
        assert client.get(PATH).status_code == 204
