"""Unreadable records in Redis keep no client from the rest, and are logged once."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from poc_core.records import RoundState
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import MODEL, round_config

# Paths that read workers, models, rounds and outboxes.
PATHS = (
    "/api/v1/inference/pow/status",
    *("/ready", "/health", "/metrics", "/v1/models", "/api/v1/pow/status", "/api/v1/state"),
    *(
        "/api/v1/gpu/devices",
        "/api/v1/gpu/driver",
        "/api/v1/models/list",
        "/api/v1/inference/up/status",
    ),
)

BAD_RECORDS: dict[str, Any] = {
    "no JSON": b"{",
    "no object": b"7",
    "no number": {"port": "http"},
    "not all of it": {"id": None},
    "no record's field": {"info": {"name": 7}},
    "no GPUs": {"gpus": {"devices": 5}},
    "no counts": {"stats": {"slices": "many", "chat_active": []}},
    "no text": b'{"host":"\xff"}',
}


def put(redis: Redis, key: str, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if value is None:
            redis.hdel(key, name)
        else:
            redis.hset(key, name, value)


def answers(client: TestClient) -> dict[str, int]:
    return {path: client.get(path).status_code for path in PATHS}


@pytest.fixture
def good(client: TestClient, serve: Callable[..., Any], rounds: RoundStore) -> dict[str, int]:
    """What paths answer when all is well."""
    serve("good")
    rounds.store(round_config(), RoundState.GENERATING)
    found = answers(client)
    assert set(found.values()) == {200}, found
    return found


@pytest.mark.promise(
    "a compromised host", "cannot stop a process by writing unreadable records or messages"
)
@pytest.mark.parametrize("bad", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_workers_record_that_cannot_be_read_hides_no_other(
    client: TestClient,
    serve: Callable[..., Any],
    redis: Redis,
    good: dict[str, int],
    bad: bytes | dict[str, Any],
) -> None:
    serve("bad")
    if isinstance(bad, dict):
        told: Any = redis.hget("poc:worker:bad", "record")
        bad = json.dumps(json.loads(told) | bad).encode()
    put(redis, "poc:worker:bad", {"record": bad})
    assert answers(client) == good


@pytest.mark.promise(
    "a compromised host", "cannot stop a process by writing unreadable records or messages"
)
def test_what_is_no_record_at_all_hides_no_worker(
    client: TestClient,
    serve: Callable[..., Any],
    redis: Redis,
    good: dict[str, int],
    workers: WorkerRegistry,
) -> None:
    serve("bad")
    redis.delete("poc:worker:bad")
    redis.set("poc:worker:bad", "no hash")
    redis.zadd("poc:workers", {b"\xff": 1.0})
    redis.hset("poc:models", "another", "{")
    assert answers(client) == good
    assert ([worker.id for worker in workers.live()], [*workers.known_models()]) == (
        ["good"],
        [MODEL],
    )


def test_it_is_said_once(
    client: TestClient, serve: Callable[..., Any], redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    serve("said-once")
    redis.hset("poc:worker:said-once", "record", '{"chat_secret": {"hush": 1}}')
    for _ in range(3):
        answers(client)
    assert caplog.text.count("worker 'said-once' in Redis cannot be read") == 1
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    "fields",
    [{"bytes": "many"}, {"next_at": "soon"}, {"last_error": b"\xff"}, {"url": b"\xff"}],
    ids=str,
)
def test_an_outbox_that_cannot_be_read_hides_nothing_else(
    client: TestClient, redis: Redis, good: dict[str, int], fields: dict[str, Any]
) -> None:
    current: Any = redis.get("poc:round:current")
    put(redis, f"poc:outbox:{current.decode()}", fields)
    assert answers(client) == good
