"""The node as the network's client manages it: state, stop, up, down, versions."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from redis import Redis

from api.models import deployments
from api.version import VERSION
from poc_core.records import RoundState
from poc_core.serving.deployments import Deployment, DeploymentRecord, HostReport, HostState
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.deployments import DeploymentStore
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.official import Official, official
from tests.harness.samples import MODEL, Clock, body, distance_body, known, round_body
from tests.harness.waiting import wait_until

UP = {
    "model": MODEL,
    "dtype": "auto",
    "additional_args": ["--max-model-len", "512", "--port", "5000"],
}

Serve = Callable[..., Any]


class Host:
    """Reports what it is told to."""

    def __init__(self, store: DeploymentStore) -> None:
        self.store = store

    def record(self) -> DeploymentRecord:
        return known(self.store.read())

    def says(self, state: HostState, name: str = "h1", **changes: Any) -> None:
        record = self.store.read()
        wanted = record.wanted if record else None
        said = {
            "generation": record.generation if record else 0,
            "model": wanted.name if wanted else None,
        }
        self.store.report(HostReport(id=name, host=name, state=state, **(said | changes)))


@pytest.fixture
def store(redis: Redis, settings: Settings, clock: Clock) -> DeploymentStore:
    return DeploymentStore(redis, settings, clock)


@pytest.fixture
def host(store: DeploymentStore) -> Host:
    """One that lives and runs nothing."""
    host = Host(store)
    host.says(HostState.IDLE)
    return host


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Sends a request from another thread."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


def up_status(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/v1/inference/up/status").json()
    return found


def state(client: TestClient) -> tuple[str, str, bool]:
    answer = client.get("/api/v1/state").json()
    return answer["state"], answer["loaded_model"], answer["inference_healthy"]


def wait_generation(store: DeploymentStore, generation: int) -> None:
    wait_until(
        lambda: (record := store.read()) and record.generation == generation,
        f"generation {generation}",
    )


# Up.


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


# Stop and down.


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


# State.


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
