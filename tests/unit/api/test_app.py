"""The application as a whole: Redis away, its own description, what it imports."""

import json
from collections.abc import Callable
from typing import Any, cast

import fakeredis
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel
from redis.exceptions import ResponseError

from api.app import create_app
from api.proofs.dispatch import Dispatcher
from api.routes import examples
from api.routes.services import Services
from poc_core import answers
from poc_core.schemes.artifact.answers import ArtifactResult, ValidationResult
from poc_core.schemes.artifact.requests import GenerateBody
from poc_core.schemes.decode.answers import DecodeResult
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from tests.harness.samples import MODEL, RecordingDispatcher, body, worker_record
from tests.harness.waiting import wait_until

CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/api/v1/pow/generate", body()),
    ("GET", "/api/v1/pow/generate/" + "0" * 32, None),
    ("GET", "/api/v1/pow/status", None),
    ("POST", "/api/v1/pow/stop", None),
    ("GET", "/api/v1/state", None),
    ("GET", "/api/v1/inference/up/status", None),
    ("POST", "/api/v1/stop", None),
    ("GET", "/ready", None),
    ("GET", "/readyz", None),
    ("GET", "/health", None),
]


@pytest.fixture
def client_of_server(server: fakeredis.FakeServer, settings: Settings) -> TestClient:
    redis = fakeredis.FakeRedis(server=server)
    services = Services(settings, redis, cast(Dispatcher, RecordingDispatcher()))
    services.workers.heartbeat(worker_record())
    return TestClient(create_app(services=services), raise_server_exceptions=False)


@pytest.mark.parametrize(("method", "path", "sent"), CALLS, ids=[path for _, path, _ in CALLS])
def test_redis_away_is_503_and_the_api_recovers_by_itself(
    server: fakeredis.FakeServer, client_of_server: TestClient, method: str, path: str, sent: Any
) -> None:
    server.connected = False
    answer = client_of_server.request(method, path, json=sent)
    assert answer.status_code == 503
    assert "cannot reach its Redis" in answer.json()["detail"]
    assert int(answer.headers["Retry-After"]) > 0
    server.connected = True

    def recovered() -> bool:  # what follows Redis tries it again after a while
        services = client_of_server.app.state.services  # type: ignore[attr-defined]
        services.workers.heartbeat(worker_record())  # that of the fixture may be over by now
        return client_of_server.request(method, path, json=sent).status_code in (200, 404)

    wait_until(recovered)


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        ("MISCONF Errors writing to the AOF file: No space left on device", 503),
        (
            (
                "Error running script: @user_script: 1: -OOM command not allowed when used memory >"
                " 'maxmemory'."
            ),
            503,
        ),
        ("Error running script: @user_script: 1: attempt to index a nil value", 500),
    ],
)
def test_redis_without_room_is_503_and_a_script_that_fails_is_500(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, refusal: str, status: int
) -> None:
    def refuse(*_: object) -> None:
        raise ResponseError(refusal)

    monkeypatch.setattr(JobStore, "read", refuse)
    assert client.get("/api/v1/pow/generate/" + "0" * 32).status_code == status


def test_redis_away_leaves_livez_alone(
    server: fakeredis.FakeServer, client_of_server: TestClient
) -> None:
    server.connected = False
    assert client_of_server.get("/livez").status_code == 200


def test_a_mistake_of_ours_is_500_without_details(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("poc_core.state.jobs.JobStore.read", broken)
    answer = client.get("/api/v1/pow/generate/" + "0" * 32)
    assert (answer.status_code, answer.json()) == (
        500,
        {"detail": "The node failed; its log has the reason."},
    )
    assert answer.headers["Connection"] == "close"  # uvicorn closes it


def test_the_factory_needs_no_redis() -> None:
    with TestClient(create_app(Settings(redis_url="redis://127.0.0.1:1/0"))) as client:
        assert client.get("/livez").status_code == 200
        assert client.get("/api/v1/pow/status").status_code == 503


def test_openapi_describes_every_endpoint_with_examples(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    paths = document["paths"]
    pow_paths = {
        path.removeprefix("/api/v1/pow/") for path in paths if path.startswith("/api/v1/pow/")
    }
    assert pow_paths == {
        *("generate", "generate/{request_id}", "status", "stop"),
        *("init", "init/generate", "init/validate", "phase/generate", "phase/validate", "validate"),
    }
    others = {
        path
        for path in paths
        if not path.startswith(("/api/v1/pow/", "/v1/", "/tokenize", "/detokenize"))
    }
    aggregator_paths = {path.removeprefix("/api/v1/") for path in others}
    assert aggregator_paths == {
        *(
            "gpu/devices",
            "gpu/driver",
            "models",
            *(f"models/{name}" for name in ("status", "download", "list", "space")),
        ),
        *("state", "stop", "versions", "/health", "/livez", "/ready", "/readyz", "/metrics"),
        *("clock", "metrics", "hosts/join", "hosts/standing"),
        *(f"inference/{name}" for name in ("up", "up/async", "up/status", "down")),
        *(
            f"inference/pow/{name}"
            for name in ("init/generate", "generate", "generate/{request_id}", "status", "stop")
        ),
    }
    post = paths["/api/v1/pow/generate"]["post"]
    assert set(post["responses"]) >= {"200", "400", "409", "413", "422", "429", "500", "503"}
    assert post["requestBody"]["content"]["application/json"]["examples"]
    for response in post["responses"].values():
        content = response["content"]["application/json"]
        assert content.get("example") or content.get("examples")


def test_openapi_says_how_a_key_is_sent_and_what_tags_are_for(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert (schemes["bearer"]["type"], schemes["bearer"]["scheme"]) == ("http", "bearer")
    assert {"bearer": []} in document["security"]
    assert document["paths"]["/livez"]["get"]["security"] == []
    described = {tag["name"] for tag in document["tags"] if tag["description"]}
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert {tag for operation in operations for tag in operation["tags"]} == described
    assert [o["summary"] for o in operations if not o.get("description")] == []


def test_openapi_refers_to_nothing_that_is_missing(client: TestClient) -> None:
    text = client.get("/openapi.json").text
    schemas = json.loads(text)["components"]["schemas"]
    referred = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert referred - set(schemas) == set()


@pytest.mark.parametrize("name", GenerateBody.examples)
def test_the_example_bodies_are_accepted(
    client: TestClient, serve: Callable[..., Any], name: str
) -> None:
    serve("w1")
    example = GenerateBody.examples[name]["value"]
    assert example["params"]["model"] == MODEL
    assert client.post("/api/v1/pow/generate", json=example | {"wait": False}).status_code == 200


def test_the_example_answers_are_what_they_illustrate() -> None:
    models: dict[str, type[BaseModel]] = {
        "artifacts": ArtifactResult,
        "validation": ValidationResult,
        "chains": DecodeResult,
    }
    assert examples.RESULTS.keys() == models.keys()
    illustrated: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (answers.Queued, examples.QUEUED_EXAMPLE),
        (answers.Progress, examples.RUNNING_EXAMPLE),
        *((models[name], example) for name, example in examples.RESULTS.items()),
    ]
    for model, example in illustrated:
        model.model_validate(example["value"], extra="forbid")
