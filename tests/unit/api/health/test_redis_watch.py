"""A Redis that is away is told in the API's log and in all that tells health."""

import logging
from collections.abc import Callable
from typing import cast
from unittest.mock import Mock

import fakeredis
import pytest
from fastapi.testclient import TestClient
from redis.exceptions import TimeoutError

from api.app import create_app
from api.health.redis_watch import RedisWatch
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.settings import Settings
from poc_core.state import scripts
from tests.harness.samples import Clock, RecordingDispatcher


@pytest.fixture
def watch(server: fakeredis.FakeServer, clock: Clock) -> RedisWatch:
    return RedisWatch(fakeredis.FakeRedis(server=server), clock)


def test_its_absence_and_its_return_are_a_line_each(
    watch: RedisWatch,
    server: fakeredis.FakeServer,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="api.health.redis_watch")
    watch.look()
    assert watch.away_since is None
    server.connected = False
    began = clock.now
    for _ in range(3):
        watch.look()
        clock.now += 4
    since: float | None = watch.away_since
    assert (since, len(caplog.messages)) == (began, 1)
    assert "Redis does not answer" in caplog.messages[0]
    assert "--redis-url" in caplog.messages[0]
    server.connected = True
    watch.look()
    assert caplog.messages[1:] == ["Redis answers again, after 12 s"]
    assert watch.away_since is None


@pytest.mark.promise(
    "a Redis user",
    "can use the node's scripts again after Redis has lost the scripts",
)
def test_forgotten_scripts_are_there_again_within_two_seconds(
    watch: RedisWatch, server: fakeredis.FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the seconds between two looks; a look loads what Redis has forgotten."""
    periods: list[float] = []
    looks: list[Callable[[], None]] = []

    def begin(_name: str, period_s: float, look: Callable[[], None]) -> Mock:
        periods.append(period_s)
        looks.append(look)
        return Mock()

    monkeypatch.setattr("api.health.redis_watch.Periodic", begin)
    watch.start()
    redis = fakeredis.FakeRedis(server=server)
    known = scripts.load(redis, "count_jobs")
    redis.script_flush()
    assert redis.script_exists(known.sha) == [False]
    for look in looks:
        look()
    assert redis.script_exists(known.sha) == [True]
    assert periods[0] <= 2.0


def test_only_a_silence_is_mute(watch: RedisWatch) -> None:
    watch.note_away(TimeoutError("no answer"))
    assert watch.is_mute
    watch.note_back()
    watch.note_away(ConnectionError("refused"))
    assert not watch.is_mute


def test_without_redis_readiness_and_metrics_say_since_when(
    settings: Settings, server: fakeredis.FakeServer, clock: Clock
) -> None:
    redis = fakeredis.FakeRedis(server=server)
    dispatcher = cast(Dispatcher, RecordingDispatcher())
    services = Services(settings, redis, dispatcher, clock)
    client = TestClient(create_app(settings, services), raise_server_exceptions=False)
    server.connected = False
    client.get("/readyz")
    clock.now += 12
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["detail"]) == (
        503,
        "The node cannot reach its Redis: Redis does not answer for 12 s.",
    )
    assert int(answer.headers["Retry-After"]) > 0
    scraped = client.get("/metrics")
    assert scraped.status_code == 200
    assert 'proofline_health{level="down"} 1.0' in scraped.text
    assert 'proofline_health_reasons{kind="redis"} 1.0' in scraped.text
    assert "proofline_queued_nonces" not in scraped.text
