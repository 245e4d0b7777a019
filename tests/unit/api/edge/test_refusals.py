"""Requests that are refused, and keys that are used, as events."""

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.app import create_app
from api.edge.keys import KeyFile, Role
from api.edge.refusals import KEYS_S, REFUSALS_S, Refusals
from api.routes.services import Services
from poc_core.settings import Settings
from poc_core.state.events import Events
from tests.harness.samples import Clock


@pytest.fixture
def refusals(clock: Clock) -> Refusals:
    return Refusals(clock)


@pytest.fixture
def events(redis: Redis, clock: Clock) -> Events:
    return Events(redis, clock)


def texts(events: Events) -> list[str]:
    return [event.text for event in events.read()]


def test_the_first_of_a_kind_is_told_at_once_and_others_together(
    refusals: Refusals, events: Events, clock: Clock
) -> None:
    for _ in range(2):
        refusals.refused(401, "POST", "/api/v1/stop", "192.0.2.1")
        refusals.report(events)
    assert texts(events) == ["POST /api/v1/stop is answered 401; the last client is 192.0.2.1."]
    refusals.refused(401, "POST", "/api/v1/stop", "192.0.2.2")
    clock.now += REFUSALS_S
    refusals.report(events)
    assert texts(events)[0] == (
        "POST /api/v1/stop is answered 401, 2 times; the last client is 192.0.2.2."
    )


@pytest.mark.parametrize(
    ("status", "path"), [(200, "/v1/models"), (404, "/nowhere"), (503, "/readyz")]
)
def test_answers_that_refuse_nobody_are_no_events(
    refusals: Refusals, events: Events, status: int, path: str
) -> None:
    refusals.refused(status, "GET", path, "192.0.2.1")
    refusals.report(events)
    assert texts(events) == []


def test_a_path_is_cut_at_80_characters(refusals: Refusals, events: Events) -> None:
    for n_chars in (80, 81):
        refusals.refused(400, "GET", "x" * n_chars, "192.0.2.1")
    refusals.report(events)
    assert {text.split()[1] for text in texts(events)} == {"x" * 80, "x" * 80 + "…"}


def test_a_flood_of_different_requests_is_bounded(refusals: Refusals, events: Events) -> None:
    for n in range(1000):
        refusals.refused(400, "GET", f"/v1/{n}", "192.0.2.1")
    refusals.report(events)
    assert len(texts(events)) == 30


def test_a_key_is_told_once_an_hour(refusals: Refusals, events: Events, clock: Clock) -> None:
    for _ in range(3):
        refusals.used("ci", "192.0.2.1")
        refusals.report(events)
    clock.now += KEYS_S
    refusals.report(events)
    assert texts(events) == [
        "The key ci is used, from 192.0.2.1.",
        "The key ci is used, from 192.0.2.1.",
    ]


def test_the_api_notes_who_was_refused_and_which_key_came(
    client: TestClient, tmp_path_factory: pytest.TempPathFactory, redis: Redis
) -> None:
    keys = KeyFile(tmp_path_factory.mktemp("keys") / "keys.json")
    services: Services = client.app.state.services  # type: ignore[attr-defined]
    guarded = create_app(Settings(api_keys_file=keys.path), services, "0.0.0.0")
    stranger = TestClient(guarded, client=("192.0.2.1", 1234))
    assert stranger.get("/api/v1/pow/status").status_code == 401
    bearer = {"Authorization": f"Bearer {keys.add('looks', [Role.READ])}"}
    assert stranger.get("/api/v1/pow/status", headers=bearer).status_code == 200
    services.refusals.report(services.events)
    found = [event.text for event in services.events.read() if event.kind != "node"]
    assert sorted(found) == [
        "GET /api/v1/pow/status is answered 401; the last client is 192.0.2.1.",
        "The key looks is used, from 192.0.2.1.",
    ]
