"""Requests that cannot be served: status, a message on what to change, nothing enqueued."""

import base64
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel
from redis import Redis

from poc_core.fields import MAX_NONCE
from poc_core.schemes.artifact.requests import ArtifactRoundBody, GenerateBody
from poc_core.schemes.distance.requests import DistanceRoundBody
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import MODEL, RecordingDispatcher, body, distance_body, round_body

pytestmark = pytest.mark.usefixtures("a_worker")

GENERATE = "/api/v1/pow/generate"
START = "/api/v1/pow/init/generate"

Body = Callable[..., dict[str, Any]]
BODIES: dict[Body, type[BaseModel]] = {
    body: GenerateBody,
    round_body: ArtifactRoundBody,
    distance_body: DistanceRoundBody,
}


@pytest.fixture(autouse=True)
def nothing_begins(
    redis: Redis, dispatcher: RecordingDispatcher, rounds: RoundStore
) -> Iterator[None]:
    """Holds after every test of this module."""
    yield
    assert dispatcher.woken == []
    assert rounds.current() is None
    assert list(redis.scan_iter("poc:job*")) == []
    assert redis.get("poc:queued_nonces") is None


def post(client: TestClient, right: Body, **changes: Any) -> Any:
    path = GENERATE if right is body else START
    return client.post(path, json=right(**changes))


def vector(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}e", *numbers)).decode()


def validation(vector_b64: Any) -> dict[str, Any]:
    return {"nonces": [4], "validation": {"artifacts": [{"nonce": 4, "vector_b64": vector_b64}]}}


A_URL = "must look like http://host:port/path"
BARE = "leave out the query and fragment"
AT_LEAST_1, AT_LEAST_0 = "greater than or equal to 1", "greater than or equal to 0"
MALFORMED: list[tuple[Body, dict[str, Any], str, str]] = [
    (body, {"nonces": [1, 2, 1]}, "nonces", "Nonce 1 is listed twice; list each nonce once"),
    (body, {"nonces": [0, -1]}, "nonces.1", AT_LEAST_0),
    (body, {"nonces": [MAX_NONCE + 1]}, "nonces.0", "less than or equal to 9223372036854775807"),
    (body, {"nonces": [10**4000]}, "nonces.0", "less than or equal to 9223372036854775807"),
    (body, {"nonces": [1.5]}, "nonces.0", "valid integer"),
    (body, {"nonces": ["1"]}, "nonces.0", "valid integer"),
    (body, {"nonces": [True]}, "nonces.0", "valid integer"),
    (body, {"nonces": []}, "nonces", "at least 1 item"),
    (body, {"nonces": 5}, "nonces", "valid array"),
    (body, {"block_hash": ""}, "block_hash", "at least 1 character"),
    (body, {"block_hash": "x" * 257}, "block_hash", "at most 256 characters"),
    (body, {"block_hash": "x" * 100_000}, "block_hash", "at most 256 characters"),
    (body, {"block_hash": 5}, "block_hash", "valid string"),
    (body, {"public_key": ""}, "public_key", "at least 1 character"),
    (body, {"public_key": "x" * 257}, "public_key", "at most 256 characters"),
    (body, {"block_height": -1}, "block_height", AT_LEAST_0),
    (body, {"node_count": 0}, "node_count", AT_LEAST_1),
    (body, {"params": {"model": ""}}, "params.model", "at least 1 character"),
    (body, {"params": {"k_dim": 0}}, "params.k_dim", AT_LEAST_1),
    (body, {"params": {"seq_len": 0}}, "params.seq_len", AT_LEAST_1),
    (body, {"params": {"seqlen": 5}}, "params.seqlen", "not permitted"),
    (body, {"wait": 5}, "wait", "boolean"),
    (body, {"batch_size": 0}, "batch_size", AT_LEAST_1),
    (body, {"batch_size": 10**6}, "batch_size", "less than or equal to 1024"),
    (body, {"url": "ftp://host/path"}, "url", A_URL),
    (body, {"url": "http://"}, "url", A_URL),
    (body, {"url": "http://host:99999/"}, "url", A_URL),
    (body, {"url": "http://a\\@host/"}, "url", A_URL),  # others read it otherwise
    (body, {"url": "http://host/stop%3Fx="}, "url", BARE),
    (body, {"url": "http://host/stop?"}, "url", BARE),
    (body, {"url": "http://host/stop#"}, "url", BARE),
    (body, {"url": "http://169.254.169.254/"}, "url", "allow it with POC_CALLBACK_ALLOW"),
    (body, {"url": "http://127.0.0.1:8000/api/v1/pow"}, "url", "is the node's own"),
    (body, {"url": "http://host/" + "x" * 3000}, "url", "at most 2048 characters"),
    (body, {"stat_test": {"p_mismatch": 2}}, "stat_test.p_mismatch", "less than or equal to 1"),
    (body, {"stat_test": {"dist_threshold": -1}}, "stat_test.dist_threshold", "equal to 0"),
    (round_body, {"url": "ftp://host/path"}, "url", A_URL),
    (round_body, {"url": "receiver:9000"}, "url", A_URL),
    (round_body, {"url": "http://"}, "url", A_URL),
    (round_body, {"url": "http://host:99999"}, "url", A_URL),
    (round_body, {"url": "http://ho\nst/"}, "url", A_URL),
    (round_body, {"url": "http://ho st/"}, "url", A_URL),
    (round_body, {"url": "http://[v1.a]/"}, "url", A_URL),
    (round_body, {"url": "http://host/x?y=1"}, "url", "leave out the query and fragment"),
    (round_body, {"url": "http://[fe80::1]/"}, "url", "allow it with POC_CALLBACK_ALLOW"),
    (distance_body, {"callback_url": "http://localhost:6379"}, "callback_url", "the node's own"),
    (distance_body, {"callback_url": "file:///etc"}, "callback_url", A_URL),
    (round_body, {"node_id": 3, "node_count": 3}, "", "node_id must be smaller than node_count"),
    (distance_body, {"node_id": 1, "node_count": 1}, "", "node_id must be smaller than node_count"),
    (round_body, {"group_id": 2, "n_groups": 2}, "", "group_id must be smaller than n_groups"),
    (distance_body, {"group_id": 2, "n_groups": 2}, "", "group_id must be smaller than n_groups"),
    (round_body, {"node_count": 0}, "node_count", AT_LEAST_1),
    (distance_body, {"node_count": 0}, "node_count", AT_LEAST_1),
    (round_body, {"n_groups": 0}, "n_groups", AT_LEAST_1),
    (round_body, {"node_id": -1}, "node_id", AT_LEAST_0),
    (round_body, {"node_count": MAX_NONCE + 1}, "node_count", "less than or equal to 9223"),
    (round_body, {"node_id": "0"}, "node_id", "valid integer"),
    (round_body, {"batch_size": 0}, "batch_size", AT_LEAST_1),
    (distance_body, {"batch_size": 0}, "batch_size", AT_LEAST_1),
    (round_body, {"params": {"seqlen": 5}}, "params.seqlen", "not permitted"),
    (round_body, {"params": {"seq_len": 0}}, "params.seq_len", AT_LEAST_1),
    (round_body, {"params": {"k_dim": 0}}, "params.k_dim", AT_LEAST_1),
    (round_body, {"block_hash": ""}, "block_hash", "at least 1 character"),
    (round_body, {"public_key": "x" * 257}, "public_key", "at most 256 characters"),
    (round_body, {"block_height": -1}, "block_height", AT_LEAST_0),
    (distance_body, {"r_target": 0}, "r_target", "greater than 0"),
    (distance_body, {"r_target": 2.1}, "r_target", "less than or equal to 2"),
    (distance_body, {"r_target": "low"}, "r_target", "valid number"),
    (distance_body, {"use_sign_flips": False}, "", "Set one of use_sign_flips and use_layer"),
    (distance_body, {"use_sign_flips": True, "use_layer_hooks": True}, "", "not both"),
]


@pytest.mark.parametrize(
    ("right", "changes", "where", "message"),
    MALFORMED,
    ids=lambda value: getattr(value, "__name__", str(value))[:40],
)
def test_422_says_where_and_what_for(
    client: TestClient, right: Body, changes: dict[str, Any], where: str, message: str
) -> None:
    answer = post(client, right, **changes)
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["detail"]
    assert ".".join(str(part) for part in problem["loc"]) == f"body.{where}".rstrip(".")
    assert message in problem["msg"]
    assert len(answer.content) < 500


@pytest.mark.parametrize(
    ("right", "field"),
    [
        (right, name)
        for right, model in BODIES.items()
        for name, field in model.model_fields.items()
        if field.is_required() and name != "r_target"
    ],
)
def test_422_for_a_missing(client: TestClient, right: Body, field: str) -> None:
    sent = right()
    del sent[field]
    answer = client.post(GENERATE if right is body else START, json=sent)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", field]


def raw(**replaced: str) -> bytes:
    """A right body in which the JSON of some fields is replaced by other text."""
    text = json.dumps(body(**{name: f"<{name}>" for name in replaced}))
    for name, json_text in replaced.items():
        text = text.replace(f'"<{name}>"', json_text)
    return text.encode("utf-8", "surrogatepass")


NOT_JSON: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"nonces=1",
    "half of it": raw()[:-5],
    "bytes that are not UTF-8": raw(block_hash='"X"').replace(b"X", b"\xff\xfe"),
    "UTF-16": raw().decode().encode("utf-16"),
    "a lone surrogate, escaped": raw(block_hash=r'"\ud800"'),
    "a lone surrogate, encoded": raw(block_hash='"\ud800"'),
    "brackets 60,000 deep": b"[" * 60_000,
    "brackets 100,000 deep": b"[" * 100_000,  # more than a round's body may have
    "a list": b"[1, 2]",
    "null": b"null",
}


@pytest.mark.parametrize(
    ("path", "case"),
    [
        *(("generate", case) for case in NOT_JSON),
        *(
            (path, case)
            for path in ("init/generate", "init", "init/validate")
            for case in NOT_JSON
            if case != "brackets 100,000 deep"
        ),
    ],
)
def test_422_for_a_body_that_is(client: TestClient, path: str, case: str) -> None:
    answer = client.post(
        f"/api/v1/pow/{path}", content=NOT_JSON[case], headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"][0]["msg"]
    assert len(answer.content) < 500


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["nonces", "stat_test"])
def test_422_for_a_number_that_is_none(client: TestClient, field: str, number: str) -> None:
    text = f"[{number}]" if field == "nonces" else f'{{"dist_threshold": {number}}}'
    answer = client.post(
        GENERATE, content=raw(**{field: text}), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422, answer.text
    assert "NaN" not in answer.text


def test_422_does_not_list_thousands_of_problems(client: TestClient) -> None:
    unknown = {f"unknown{i}": "x" * 100 for i in range(500)}
    answer = client.post(GENERATE, json=body(params=unknown))
    assert answer.status_code == 422
    assert len(answer.json()["detail"]) == 10


def test_422_shortens_a_field_name_of_100_kb(client: TestClient) -> None:
    answer = client.post(GENERATE, json=body(params={"y" * 100_000: 1}))
    assert answer.status_code == 422
    assert len(answer.content) < 500


@pytest.mark.parametrize("claimed", [[0, 1], [0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 2], []])
def test_400_when_the_artifacts_to_validate_are_not_those_of_the_nonces(
    client: TestClient, claimed: list[int]
) -> None:
    artifacts = [{"nonce": nonce, "vector_b64": vector(*[1.0] * 12)} for nonce in claimed]
    answer = client.post(GENERATE, json=body(nonces=[0, 1, 2], validation={"artifacts": artifacts}))
    assert answer.status_code == 400
    assert "exactly one artifact for each of nonces" in answer.json()["detail"]


DEPLOYED = (("model", "other", MODEL), ("seq_len", 1025, 1024), ("k_dim", 129, 128))


@pytest.mark.parametrize(
    ("right", "field", "requested", "deployed"),
    [
        *((right, *row) for right in (body, round_body) for row in DEPLOYED),
        (distance_body, *DEPLOYED[1]),  # no k_dim; with one model it need not name it
    ],
)
def test_409_names_what_is_requested_and_what_is_deployed(
    client: TestClient, right: Body, field: str, requested: Any, deployed: Any
) -> None:
    changes = {field: requested}
    changes = changes if right is distance_body else {"params": changes}
    answer = post(client, right, **changes)
    assert answer.status_code == 409
    detail = answer.json()["detail"]
    assert detail["fields"] == [field]
    assert (detail["requested"], detail["deployed"]) == ({field: requested}, {field: deployed})
    assert str(deployed) in detail["message"]


def test_409_names_every_field_at_once(client: TestClient) -> None:
    answer = client.post(GENERATE, json=body(params={"seq_len": 9999, "k_dim": 9999}))
    detail = answer.json()["detail"]
    assert detail["fields"] == ["seq_len", "k_dim"]
    assert detail["message"] == (
        f"The model {MODEL} takes seq_len at most 1024 and k_dim at most 128."
    )


def test_409_for_a_seq_len_that_one_micro_batch_cannot_hold(
    client: TestClient, serve: Callable[..., Any]
) -> None:
    serve("w1", max_batch_tokens=512)
    answer = client.post(GENERATE, json=body(params={"seq_len": 600}))
    assert answer.json()["detail"]["deployed"] == {"seq_len": 512}


@pytest.mark.parametrize("right", BODIES)
def test_503_for_a_known_model_that_nobody_serves_now(
    client: TestClient, workers: WorkerRegistry, right: Body
) -> None:
    workers.remove("w1")
    answer = post(client, right)
    assert answer.status_code == 503
    assert f"No worker serves the model {MODEL} right now" in answer.json()["detail"]
    assert int(answer.headers["Retry-After"]) > 0
    unknown = client.post(GENERATE, json=body(params={"model": "other"}))
    assert unknown.status_code == 409
    assert unknown.json()["detail"]["deployed"] == {"model": MODEL}


def test_503_for_a_model_that_is_being_loaded(
    client: TestClient, serve: Callable[..., Any]
) -> None:
    serve("w2", model="other", state="starting")
    assert client.post(GENERATE, json=body(params={"model": "other"})).status_code == 503


@pytest.mark.parametrize("right", BODIES)
def test_503_when_nobody_ever_served_anything(
    client: TestClient, redis: Redis, right: Body
) -> None:
    redis.flushall()
    answer = post(client, right)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0


def test_429_for_more_nonces_than_may_wait(client: TestClient) -> None:
    answer = client.post(GENERATE, json=body(nonces=list(range(1001))))
    assert answer.status_code == 429
    assert "split the request" in answer.json()["detail"]
    assert int(answer.headers["Retry-After"]) > 0


def test_429_when_the_queue_is_full(
    client: TestClient, jobs: JobStore, redis: Redis, dispatcher: RecordingDispatcher
) -> None:
    first = client.post(GENERATE, json=body(nonces=list(range(999)))).json()["request_id"]
    answer = client.post(GENERATE, json=body(nonces=[1, 2, 3]))
    assert answer.status_code == 429
    assert "999 nonces wait already" in answer.json()["detail"]
    assert int(answer.headers["Retry-After"]) > 0
    assert jobs.active_jobs(MODEL) == [first]
    redis.flushall()
    dispatcher.woken.clear()


def test_429_when_jobs_with_a_url_have_all_places(
    client: TestClient, redis: Redis, settings: Settings, dispatcher: RecordingDispatcher
) -> None:
    places = range(settings.max_callbacks)
    redis.hset("poc:outbox:of_jobs", mapping=dict.fromkeys(places, "0 r c"))
    answer = client.post(GENERATE, json=body(url="http://receiver:9000"))
    assert answer.status_code == 429
    assert "try again later, or leave out the url and poll" in answer.json()["detail"]
    assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda: b" " * 200_001, "larger than 200000 bytes"),  # of a declared length
        (lambda: iter([b" " * 10_000] * 21), "split the request"),
        (lambda: b'{"nonces": [' + b"1," * 50_000 + b"1]}", "split the request"),
    ],
    ids=["declared", "chunked", "items"],
)
def test_413_for_more_than_a_request_may_hold(
    client: TestClient, content: Callable[[], Any], said: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post(GENERATE, content=content(), headers=headers)
    assert answer.status_code == 413
    assert said in answer.json()["detail"]


def test_other_methods_and_paths_have_json_details(client: TestClient) -> None:
    assert client.get("/api/v1/pow/stop").json() == {"detail": "Method Not Allowed"}
    assert client.get("/api/v1/nothing").json() == {"detail": "Not Found"}
