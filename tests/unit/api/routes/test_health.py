"""What the node says of its health, to the network and to supervisors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.health import roster
from poc_core.serving.deployments import HostReport, HostState
from poc_core.serving.places import WorkerPlace
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import MODEL, Clock, round_body

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
    redis.pexpire("poc:worker:w1", int(1000 * (settings.worker_ttl_s - roster.SILENT_S)))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["health"]["level"]) == (200, "degraded")
    redis.pexpire("poc:worker:w2", int(1000 * (settings.worker_ttl_s - roster.SILENT_S)))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["health"]["level"]) == (503, "down")
    assert "0 of 2 workers ready" in answer.json()["detail"]
    health = client.get("/api/v1/pow/status").json()["health"]
    assert (health["level"], health["workers_ready"]) == ("down", 0)
    assert client.get("/api/v1/inference/up/status").json()["health"]["level"] == "down"
    assert 'proofline_health{level="down"} 1.0' in client.get("/metrics").text


@pytest.fixture
def killed(
    redis: Redis, settings: Settings, clock: Clock, client: TestClient, serve: Serve
) -> None:
    """A round's only worker is killed, and its supervisor starts it again."""
    serve("w1")
    assert client.post("/api/v1/inference/pow/init/generate", json=round_body()).status_code == 200
    redis.delete("poc:worker:w1")
    ended = WorkerPlace(name="h1/cpu0", pid=None, is_ready=False, since=clock.now, last_exit="x")
    host = HostReport(id="h1", host="h1", state=HostState.SERVING, generation=0, model=MODEL)
    store = DeploymentStore(redis, settings, clock)
    store.report(host.model_copy(update={"places": (ended,)}))


@pytest.mark.usefixtures("killed")
def test_a_round_whose_only_worker_is_being_replaced_has_not_failed(
    client: TestClient, clock: Clock
) -> None:
    answers = [client.get(path) for path in ("/health", "/readyz", "/v3.0.8/health")]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert "continues when a worker is ready again" in answers[0].json()["reason"]
    assert answers[1].json()["health"]["level"] == "down"
    found = client.get("/api/v1/inference/pow/status").json()
    assert (found["status"], found["backends"]) == ("GENERATING", [])
    assert found["reason"] == answers[0].json()["reason"]
    clock.now += 601
    assert [client.get(path).status_code for path in ("/health", "/readyz")] == [503, 503]
    assert client.get("/api/v1/inference/pow/status").json()["status"] == "NO_BACKENDS"


@pytest.mark.usefixtures("killed")
def test_after_the_rounds_stop_a_node_without_workers_has_failed(client: TestClient) -> None:
    client.post("/api/v1/inference/pow/stop")
    assert [client.get(path).status_code for path in ("/health", "/readyz")] == [503, 503]
    assert client.get("/api/v1/inference/pow/status").json()["status"] == "NO_BACKENDS"


def test_engines_that_are_kept_after_a_stop_are_no_health(
    client: TestClient, serve: Serve, redis: Redis, settings: Settings, workers: WorkerRegistry
) -> None:
    workers.heartbeat(replace(serve("w1"), host_id="h1"))
    host = HostReport(id="h1", host="h1", state=HostState.KEEPING, generation=2)
    DeploymentStore(redis, settings).report(host)
    answer = client.get("/health")
    assert answer.status_code == 503
    assert "no model is deployed" in answer.json()["detail"]
