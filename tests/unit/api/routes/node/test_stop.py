"""A stop ends the deployment, its round and its jobs."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import httpx
import pytest
from fastapi.testclient import TestClient

from api.models import deployments
from poc_core.records import RoundState
from poc_core.serving.deployments import HostState
from poc_core.state.deployments import DeploymentStore
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import MODEL, body, known, round_body
from tests.harness.waiting import wait_until
from tests.peers.deployed_host import UP, Host, Serve, state, up_status, wait_generation


@pytest.mark.parametrize("path", ["stop", "inference/down"])
def test_stop_ends_round_and_jobs_and_answers_when_the_engines_are_gone(
    client: TestClient,
    host: Host,
    serve: Serve,
    rounds: RoundStore,
    jobs: JobStore,
    path: str,
    aside: Callable[..., Future[httpx.Response]],
) -> None:
    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.SERVING)
    serve("w1")
    client.post("/api/v1/inference/pow/init/generate", json=round_body())
    client.post("/api/v1/pow/generate", json=body())
    waits = aside(client.post, "/api/v1/pow/generate", json=body(wait=True))
    wait_until(lambda: len(jobs.active_jobs(MODEL)) == 2, "a job that a client waits for")
    answer = aside(client.post, f"/api/v1/{path}")
    wait_generation(host.store, 2)
    current = known(rounds.current())
    assert (current.state, jobs.active_jobs(MODEL)) == (RoundState.STOPPED, [])
    assert waits.result(60).status_code == 409
    host.says(HostState.STOPPING)
    assert state(client)[0] == "STOPPED"
    assert not answer.done()
    host.says(HostState.IDLE)
    assert (answer.result(60).status_code, answer.result().json()) == (200, {"status": "OK"})
    assert client.post(f"/api/v1/{path}").status_code == 200  # idempotent
    assert up_status(client)["status"] == "idle"


@pytest.mark.parametrize("comes", ["while the work ends", "while the engines end"])
def test_stop_ends_also_work_that_others_request_meanwhile(
    client: TestClient,
    host: Host,
    serve: Serve,
    rounds: RoundStore,
    jobs: JobStore,
    aside: Callable[..., Future[httpx.Response]],
    monkeypatch: pytest.MonkeyPatch,
    comes: str,
) -> None:
    def requests() -> list[int]:
        asked = (("generate", body()), ("init/generate", round_body()))
        return [client.post(f"/api/v1/pow/{path}", json=sent).status_code for path, sent in asked]

    def then_requests(store: DeploymentStore, keeps: bool) -> int:
        assert requests() == [200, 200]
        return withdraw(store, keeps)

    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.SERVING)
    serve("w1")
    withdraw = DeploymentStore.withdraw
    if comes == "while the work ends":
        monkeypatch.setattr(DeploymentStore, "withdraw", then_requests)
    answer = aside(client.post, "/api/v1/stop")
    wait_generation(host.store, 2)
    if comes == "while the engines end":
        assert requests() == [200, 200]
    host.says(HostState.IDLE)
    assert answer.result(60).status_code == 200
    assert (known(rounds.current()).state, jobs.active_jobs(MODEL)) == (RoundState.STOPPED, [])


def test_stop_of_a_load_answers_at_once_and_the_very_same_up_goes_on(
    client: TestClient, host: Host, aside: Callable[..., Future[httpx.Response]]
) -> None:
    first = aside(client.post, "/api/v1/inference/up", json=UP)
    wait_generation(host.store, 1)
    host.says(HostState.STARTING)
    host.says(HostState.KEEPING, generation=2)
    assert client.post("/api/v1/stop").status_code == 200
    assert first.result(60).status_code == 500
    assert (up_status(client)["startup_status"], state(client)[0]) == ("cancelled", "STOPPED")
    assert up_status(client)["hosts"][0]["state"] == "keeping"
    again = aside(client.post, "/api/v1/inference/up", json=UP)
    wait_generation(host.store, 3)
    assert host.record().engines == 1
    assert up_status(client)["startup_status"] == "in_progress"
    host.says(HostState.SERVING)
    assert again.result(60).status_code == 200


def test_an_engine_that_is_kept_for_the_next_up_takes_no_proofs(
    client: TestClient, host: Host, serve: Serve, workers: WorkerRegistry, rounds: RoundStore
) -> None:
    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.STARTING)
    host.says(HostState.KEEPING, generation=2)
    assert client.post("/api/v1/stop").status_code == 200
    workers.heartbeat(replace(serve("w1"), host_id="h1"))  # its load ended after the stop
    for path, sent in (("init/generate", round_body()), ("generate", body())):
        assert client.post(f"/api/v1/inference/pow/{path}", json=sent).status_code == 503
    assert rounds.current() is None
    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.SERVING)
    assert client.post("/api/v1/pow/init/generate", json=round_body()).status_code == 200


def test_down_keeps_no_load(client: TestClient, host: Host) -> None:
    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.IDLE, generation=2)
    assert client.post("/api/v1/inference/down").status_code == 200
    assert up_status(client)["startup_status"] == "cancelled"
    client.post("/api/v1/inference/up/async", json=UP)
    assert host.record().engines == host.record().generation


def test_the_deployment_is_told_in_mlnodes_words_too(client: TestClient, host: Host) -> None:
    assert up_status(client)["startup_status"] == "not_started"
    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.STARTING)
    seen = [up_status(client)["startup_status"]]
    host.says(HostState.SERVING)
    seen.append(up_status(client)["startup_status"])
    host.store.withdraw()
    seen.append(up_status(client)["startup_status"])
    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.FAILED, error="no GPU")
    seen.append(up_status(client)["startup_status"])
    assert seen == ["in_progress", "completed", "not_started", "failed"]


@pytest.mark.parametrize("model", [MODEL, "never"])
def test_after_a_stop_a_request_for_any_model_is_early_and_not_wrong(
    client: TestClient, serve: Serve, workers: WorkerRegistry, model: str
) -> None:
    worker = serve("w1")
    client.post("/api/v1/stop")
    workers.heartbeat(replace(worker, state="draining"))
    workers.remove("w1")
    params = {"model": model}
    for path, sent in (
        ("init/generate", round_body(params=params)),
        ("generate", body(params=params)),
    ):
        answer = client.post(f"/api/v1/inference/pow/{path}", json=sent)
        assert (answer.status_code, int(answer.headers["Retry-After"]) > 0) == (503, True)


def test_stop_says_where_engines_do_not_end(
    client: TestClient, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "_GONE_S", 0.2)
    host.says(HostState.STOPPING, "h2")
    answer = client.post("/api/v1/stop")
    assert answer.status_code == 500
    told = "Engines still end on h2 (stopping); look into the logs there."
    assert answer.json()["detail"] == told
