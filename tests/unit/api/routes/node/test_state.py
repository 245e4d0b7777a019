"""The node's state, status and versions."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from redis import Redis

from api.version import VERSION
from poc_core.serving.deployments import HostState
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from tests.harness.samples import MODEL, Clock, distance_body, round_body
from tests.peers.deployed_host import UP, Host, Serve, state, up_status


def test_the_state_is_inference_also_during_a_round(
    client: TestClient, host: Host, serve: Serve
) -> None:
    serve("w1")
    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.SERVING)
    client.post("/api/v1/inference/pow/init/generate", json=round_body())
    answer = client.get("/api/v1/state").json()
    # From 3.0.14 on the network node expects a stream for callbacks, which there is none here.
    assert answer["version"] == VERSION
    assert not VERSION.startswith("3.")
    assert (answer["state"], answer["poc_status"]) == ("INFERENCE", "GENERATING")
    assert answer["poc_validation_inference"] is True


def test_a_model_without_a_ready_worker_is_deployed_and_not_healthy(
    client: TestClient, host: Host
) -> None:
    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.SERVING)
    assert state(client) == ("INFERENCE", MODEL, False)


def test_a_directory_is_told_by_the_name_it_is_served_under(client: TestClient, host: Host) -> None:
    host.store.withdraw()
    sent = {"model": "/models/x", "additional_args": ["--served-model-name", "x"]}
    client.post("/api/v1/inference/up/async", json=sent)
    host.says(HostState.SERVING)
    assert state(client)[1] == "x"


def test_workers_without_a_host_make_the_state_as_well(client: TestClient, serve: Serve) -> None:
    serve("w1", state="starting")
    assert (state(client), up_status(client)["status"]) == (("STOPPED", "", False), "starting")
    serve("w1")
    assert (state(client), up_status(client)["status"]) == (("INFERENCE", MODEL, True), "running")
    client.post("/api/v1/pow/init", json=distance_body())
    assert client.get("/api/v1/state").json()["poc_status"] == "IDLE"
    assert state(client)[0] == "INFERENCE"


@pytest.mark.parametrize("policy", ["exclusive", "off"])
def test_gateways_are_told_where_chat_and_proofs_exclude_each_other(
    client: TestClient, settings: Settings, policy: str
) -> None:
    app = client.app
    assert isinstance(app, FastAPI)
    app.state.services.settings = settings.model_copy(update={"chat_policy": policy})
    for path in ("state", "versions"):
        assert client.get(f"/api/v1/{path}").json()["poc_validation_inference"] is False


# Status and versions.


def test_up_status_tells_of_every_host(client: TestClient, host: Host, clock: Clock) -> None:
    assert up_status(client)["elapsed_seconds"] is None
    client.post("/api/v1/inference/up/async", json=UP)
    host.says(HostState.STARTING, workers=2)
    host.says(HostState.FAILED, "h2", error="no GPU")
    clock.now += 5
    found = up_status(client)
    assert (found["status"], found["elapsed_seconds"], found["model"]) == ("starting", 5, MODEL)
    hosts = [(one["host"], one["state"], one["workers"], one["error"]) for one in found["hosts"]]
    assert hosts == [("h1", "starting", 2, None), ("h2", "failed", 0, "no GPU")]
    host.says(HostState.SERVING)
    clock.now += 100
    found = up_status(client)
    assert (found["is_running"], found["status"], found["elapsed_seconds"]) == (True, "running", 5)
    host.says(HostState.STARTING)  # the node was restarted
    found = up_status(client)
    assert (found["status"], found["elapsed_seconds"]) == ("starting", None)


def test_up_status_names_models_and_counts_workers(client: TestClient, serve: Serve) -> None:
    serve("w1")
    serve("w2", model="other")
    serve("w3", state="starting")
    found = up_status(client)
    assert found["models"] == ["other", MODEL]
    assert (found["workers_running"], found["workers_starting"]) == (2, 1)
    assert found["is_starting"] is False


def test_versions_are_those_of_the_api_and_of_the_hosts(client: TestClient, host: Host) -> None:
    assert client.get("/api/v1/versions").json()["vllm_version"] is None
    host.says(HostState.IDLE, vllm_version="0.28.0")
    host.says(HostState.IDLE, "h2", vllm_version="0.28.0")
    host.says(HostState.IDLE, "h3", vllm_version="0.32.1")
    answer = client.get("/api/v1/versions").json()
    assert answer == {
        "version": answer["version"],
        "vllm_version": "0.28.0, 0.32.1",
        "poc_validation_inference": True,
    }


def test_a_node_that_waits_for_its_first_deployment_is_healthy(
    client: TestClient, redis: Redis, host: Host, store: DeploymentStore
) -> None:
    """As MLNode, whose supervisors would restart it otherwise."""
    redis.flushall()
    assert client.get("/health").status_code == 503  # no host
    host.says(HostState.IDLE)
    assert client.get("/health").status_code == 200
    assert client.get("/readyz").status_code == 503
    host.says(HostState.STARTING)
    assert client.get("/health").status_code == 503
    host.says(HostState.IDLE)
    store.withdraw()  # POST /api/v1/stop
    host.says(HostState.IDLE)
    answer = client.get("/health")
    assert answer.status_code == 503
    assert "no model is deployed" in answer.json()["detail"]
