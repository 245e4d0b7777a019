"""A model is deployed (`up`), or refused."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from redis import ConnectionError, Redis, RedisError, TimeoutError

from api import errors
from api.models import deployments
from poc_core.records import RoundState
from poc_core.serving.deployments import Deployment, DeploymentStatus, HostState
from poc_core.state import keys
from poc_core.state.deployments import DeploymentStore
from poc_core.state.rounds import RoundStore
from tests.harness.official import Official, official
from tests.harness.samples import MODEL, known, round_body
from tests.peers.deployed_host import UP, Host, Serve, state, up_status, wait_generation


def test_up_answers_when_the_model_serves(
    client: TestClient, host: Host, serve: Serve, aside: Callable[..., Future[httpx.Response]]
) -> None:
    answer = aside(client.post, "/api/v1/inference/up", json=UP)
    wait_generation(host.store, 1)
    host.says(HostState.STARTING)
    assert (up_status(client)["status"], state(client)) == ("starting", ("STOPPED", "", False))
    assert not answer.done()
    serve("w1")
    host.says(HostState.SERVING)
    assert (answer.result(60).status_code, answer.result().json()) == (200, {"status": "OK"})
    assert state(client) == ("INFERENCE", MODEL, True)


def test_what_is_stored_is_what_was_asked_for(client: TestClient, host: Host) -> None:
    sent = {
        "model": "Qwen/Qwen3-8B",
        "additional_args": ["-tp", "2", "--served-model-name", "q", "--enforce-eager"],
    }
    assert client.post("/api/v1/inference/up/async", json=sent).json() == {"status": "OK"}
    assert host.record().wanted == Deployment(
        model="Qwen/Qwen3-8B",
        served_model_name="q",
        tensor_parallel=2,
        vllm_args=("--enforce-eager",),
    )


@pytest.mark.parametrize("deployment", official(), ids=str)
def test_every_deployment_of_the_network_is_taken(
    client: TestClient, host: Host, serve: Serve, deployment: Official
) -> None:
    assert client.post("/api/v1/inference/up/async", json=deployment.body).status_code == 200
    host.says(HostState.SERVING)
    serve("w1", model=deployment.name)
    found = up_status(client)
    assert (found["status"], found["models"]) == ("running", [deployment.name])
    assert state(client) == ("INFERENCE", deployment.model, True)
    assert client.post("/api/v1/inference/up", json=deployment.body).status_code == 409


def test_what_was_left_out_is_told(
    client: TestClient, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    args = ["--trust-remote-code", "--port", "5000", "--kda-prefill-backend", "triton"]
    client.post("/api/v1/inference/up/async", json={"model": MODEL, "additional_args": args})
    unknown = "--kda-prefill-backend: vLLM 0.25.1 does not know it"
    host.says(HostState.STARTING, left_out=(unknown,))
    found = up_status(client)
    port, trust = found["left_out"]
    assert port == "--port: a node settles that by itself"
    assert trust.startswith("--trust-remote-code: not without the --revision that is trusted")
    assert found["hosts"][0]["left_out"] == [unknown]
    assert f"deployment of {MODEL}: left out {trust}" in caplog.messages


def test_a_record_that_nobody_can_read_is_told_and_stop_mends_it(
    client: TestClient, host: Host, redis: Redis
) -> None:
    redis.hset(keys.DEPLOYMENT, mapping={"generation": "9" * 400, "wanted": "{", "by": "\0"})
    host.says(HostState.IDLE)
    found = up_status(client)
    assert found["status"] == "failed"
    assert "poc:deployment cannot be read" in found["error"]
    assert state(client) == ("STOPPED", "", False)
    assert client.get("/api/v1/pow/status").status_code == 200
    host.says(HostState.IDLE, generation=1)
    assert client.post("/api/v1/stop").status_code == 200
    assert client.post("/api/v1/inference/up/async", json=UP).status_code == 200
    assert up_status(client)["status"] == "starting"


@pytest.mark.parametrize(
    ("said", "is_called"), [("float32", "float32"), ("float16", "float16"), ("half", "float16")]
)
def test_a_number_format_is_taken_from_the_body_or_the_arguments(
    client: TestClient, host: Host, said: str, is_called: str
) -> None:
    answer = client.post("/api/v1/inference/up/async", json=UP | {"dtype": said})
    assert answer.status_code == 200
    status = host.store.status()
    assert status.wanted is not None
    assert status.wanted.dtype == is_called


@pytest.mark.parametrize("path", ["up", "up/async"])
def test_up_while_a_model_starts_or_runs_is_409(client: TestClient, host: Host, path: str) -> None:
    client.post("/api/v1/inference/up/async", json=UP)
    for seen in (HostState.STARTING, HostState.SERVING):
        host.says(seen)
        answer = client.post(f"/api/v1/inference/{path}", json=UP)
        assert answer.status_code == 409
        told = "A model is deployed already; send POST /api/v1/stop first."
        assert answer.json() == {"detail": told}


def test_up_of_what_cannot_start_is_500_with_the_reason_and_can_be_asked_again(
    client: TestClient, host: Host, aside: Callable[..., Future[httpx.Response]]
) -> None:
    answer = aside(client.post, "/api/v1/inference/up", json=UP)
    wait_generation(host.store, 1)
    host.says(HostState.FAILED, error="h1/cpu0: no such model")
    assert answer.result(60).status_code == 500
    told = "The model could not be started: h1/cpu0: no such model"
    assert answer.result().json() == {"detail": told}
    assert state(client) == ("STOPPED", "", False)
    found = up_status(client)
    assert (found["status"], found["is_running"]) == ("failed", False)
    assert found["error"] == "h1/cpu0: no such model"
    assert client.post("/api/v1/inference/up/async", json=UP).status_code == 200
    assert (up_status(client)["status"], up_status(client)["error"]) == ("starting", None)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (DeploymentStore.withdraw, "The deployment was withdrawn before the model served."),
        (lambda store: store.leave("h1"), "model ended"),
    ],
    ids=["stopped", "its hosts are gone"],
)
def test_up_that_ends_meanwhile_says_so(
    client: TestClient,
    host: Host,
    aside: Callable[..., Future[httpx.Response]],
    ends: Callable[[DeploymentStore], object],
    said: str,
) -> None:
    answer = aside(client.post, "/api/v1/inference/up", json=UP)
    wait_generation(host.store, 1)
    ends(host.store)
    assert answer.result(60).status_code == 500
    assert said in answer.result().json()["detail"]


def test_up_that_takes_too_long_goes_on(
    client: TestClient, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "SERVE_S", 0.3)
    answer = client.post("/api/v1/inference/up", json=UP)
    assert answer.status_code == 500
    assert "does not serve after 0.3 s. It is still being started" in answer.json()["detail"]
    assert up_status(client)["status"] == "starting"


@pytest.mark.parametrize("path", ["up", "up/async"])
def test_up_without_a_host_is_503(client: TestClient, path: str) -> None:
    answer = client.post(f"/api/v1/inference/{path}", json=UP)
    assert answer.status_code == 503
    assert "start `proofline up` or `proofline workers`" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"additional_args": ["--middleware", "x.y"]}, "--middleware is not among the arguments"),
        (
            {"additional_args": ["--compilation-config", '{"cache_dir": "/tmp"}']},
            "--compilation-config has the key 'cache_dir'",
        ),
        (
            {"additional_args": ["--tensor-parallel-size", "9" * 5000]},
            "--tensor-parallel-size cannot have the value",
        ),
        (
            {"additional_args": ["--served-model-name", ""]},
            "--served-model-name cannot have the value",
        ),
        ({"model": "~\0"}, "characters that cannot be printed"),
        ({"model": "acme/\x1b[31mred"}, "characters that cannot be printed"),
        ({"additional_args": ["x" * 9000]}, "at most 8192 characters"),
        ({"additional_args": "--seed 1"}, "valid list"),
        ({"dtype": "int4"}, "Input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ({"dtype": ["float16"]}, "Input should be"),
        ({"model": "--trust-remote-code"}, "match pattern"),
        ({"model": ""}, "at least 1 character"),
    ],
)
def test_what_may_not_be_asked_for_is_422_and_changes_nothing(
    client: TestClient, host: Host, changes: dict[str, Any], said: str
) -> None:
    for path in ("up", "up/async"):
        answer = client.post(f"/api/v1/inference/{path}", json=UP | changes)
        assert answer.status_code == 422
        (problem,) = answer.json()["detail"]
        assert problem["loc"][:2] == ["body", *changes]
        assert said in problem["msg"]
    assert host.store.read() is None


def test_up_ends_a_round_whose_model_has_failed(
    client: TestClient, host: Host, rounds: RoundStore, serve: Serve
) -> None:
    serve("w1")
    client.post("/api/v1/inference/pow/init/generate", json=round_body())
    client.post("/api/v1/inference/up/async", json=UP)
    current = known(rounds.current())
    assert current.state is RoundState.STOPPED


def test_up_that_loses_redis_once_it_deployed_leaves_no_round(
    client: TestClient,
    host: Host,
    rounds: RoundStore,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(store: RoundStore, *args: Any) -> RoundState | None:
        if host.store.read() is not None:
            raise ConnectionError
        return switch(store, *args)

    serve("w1")
    client.post("/api/v1/inference/pow/init/generate", json=round_body())
    switch = RoundStore.switch
    monkeypatch.setattr(RoundStore, "switch", lost)
    assert client.post("/api/v1/inference/up/async", json=UP).status_code == 503
    assert client.post("/api/v1/inference/up/async", json=UP).status_code == 409
    assert known(rounds.current()).state is RoundState.STOPPED


@pytest.mark.parametrize("path", ["inference/up", "stop"])
@pytest.mark.parametrize(
    ("patience_s", "status"), [(60.0, 200), (-1.0, 503)], ids=["short", "long"]
)
def test_who_waits_for_engines_outlasts_an_outage_of_redis_that_is(
    client: TestClient,
    host: Host,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    patience_s: float,
    status: int,
) -> None:
    """The network node gives up a node whose `up` is not 200; a failover takes seconds."""

    def failing(store: DeploymentStore) -> DeploymentStatus:
        if outage and store.read() is not None:
            raise outage.pop()
        serve("w1")
        host.says(HostState.SERVING if path == "inference/up" else HostState.IDLE)
        return read(store)

    outage: list[RedisError] = [ConnectionError("no primary"), TimeoutError("a silent host")]
    read = DeploymentStore.status
    monkeypatch.setattr(errors, "OUTLASTED_S", patience_s)
    if path == "stop":
        client.post("/api/v1/inference/up/async", json=UP)
    monkeypatch.setattr(DeploymentStore, "status", failing)
    assert client.post(f"/api/v1/{path}", json=UP).status_code == status
