"""A round starts as its body says, or is refused."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from poc_core.callbacks import callback_url
from poc_core.records import RoundState
from poc_core.schemes.artifact.requests import ArtifactRoundBody, GenerateBody
from poc_core.schemes.distance.requests import DistanceRoundBody
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.round_routes import POW, START, URL, current, start
from tests.harness.samples import (
    MODEL,
    RecordingDispatcher,
    distance_body,
    known,
    round_body,
    worker_record,
)

pytestmark = pytest.mark.usefixtures("a_worker")


@pytest.mark.parametrize("sent", [round_body(), distance_body()], ids=["artifacts", "distances"])
def test_a_round_starts(client: TestClient, rounds: RoundStore, sent: dict[str, Any]) -> None:
    answer = client.post(START, json=sent)
    assert (answer.status_code, answer.json()) == (
        200,
        {"status": "OK", "pow_status": {"status": "GENERATING"}},
    )
    assert current(rounds).state is RoundState.GENERATING


def test_an_artifact_round_is_what_its_body_says(client: TestClient, rounds: RoundStore) -> None:
    place = {"node_id": 1, "node_count": 3, "group_id": 1, "n_groups": 2}
    sent = round_body(
        **place, batch_size=16, params={"k_dim": 8}, url=URL, poc_stronger_rng=True, block_height=9
    )
    config = start(client, rounds, sent).config
    assert config.model == MODEL
    assert config.spec.scheme == "artifact"
    assert (config.spec.block_hash, config.spec.public_key) == ("block", "key")
    assert (config.spec.seq_len, config.spec.options) == (64, {"k_dim": 8, "stronger_rng": True})
    assert {name: getattr(config, name) for name in place} == place
    assert (config.block_height, config.batch_size, config.url, config.terms) == (9, 16, URL, {})


def test_a_distance_round_is_what_its_body_says(client: TestClient, rounds: RoundStore) -> None:
    place = {"node_id": 1, "node_count": 3, "group_id": 1, "n_groups": 2}
    sent = distance_body(**place, batch_size=16, callback_url=URL, fraud_threshold=0.05)
    config = start(client, rounds, sent).config
    assert config.model == MODEL
    assert (config.spec.scheme, config.spec.seq_len) == ("distance", 64)
    assert config.spec.options == {"randomization": "sign_flips"}
    assert {name: getattr(config, name) for name in place} == place
    assert (config.batch_size, config.url) == (16, URL)
    assert config.terms == {"r_target": 1.405, "fraud_threshold": 0.05}


def test_what_an_artifact_body_leaves_out_has_the_protocols_defaults(
    client: TestClient, rounds: RoundStore
) -> None:
    sent = round_body()
    del sent["params"]["k_dim"]
    config = start(client, rounds, sent).config
    assert (config.group_id, config.n_groups, config.batch_size, config.url) == (0, 1, 32, None)
    assert config.spec.options == {"k_dim": 12, "stronger_rng": False}


def test_what_a_distance_body_leaves_out_has_the_protocols_defaults(
    client: TestClient, rounds: RoundStore
) -> None:
    sent = distance_body()
    for name in ("node_id", "node_count", "seq_len"):
        del sent[name]
    config = start(client, rounds, sent).config
    place = (config.node_id, config.node_count, config.group_id, config.n_groups)
    assert (place, config.batch_size, config.spec.seq_len) == ((0, 1, 0, 1), 32, 256)
    assert (config.terms["fraud_threshold"], config.url) == (0.01, None)


def test_layer_hooks_take_the_place_of_sign_flips(client: TestClient, rounds: RoundStore) -> None:
    config = start(client, rounds, distance_body(use_layer_hooks=True)).config
    assert config.spec.options == {"randomization": "layer_hooks"}


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("", None),  # no callbacks
        # the network's client escapes the model's name twice
        ("http://host:9000/callback/Qwen%252FQwen3-8B",) * 2,
    ],
)
def test_a_url_is_kept_as_it_is(
    client: TestClient, rounds: RoundStore, sent: str, kept: str | None
) -> None:
    assert start(client, rounds, round_body(url=sent)).config.url == kept
    assert kept is None or callback_url(kept, "generated") == f"{kept}/generated"


@pytest.mark.parametrize("sent", [round_body(), distance_body()], ids=["artifacts", "distances"])
def test_unknown_fields_are_ignored(
    client: TestClient, rounds: RoundStore, sent: dict[str, Any]
) -> None:
    start(client, rounds, sent | {"something": {"new": [1]}})


def test_every_ready_worker_of_the_model_is_told(
    client: TestClient,
    rounds: RoundStore,
    dispatcher: RecordingDispatcher,
    serve: Callable[..., Any],
) -> None:
    serve("w2")
    serve("w3", model="other")
    serve("w4", state="starting")
    start(client, rounds)
    assert dispatcher.each == ["w1", "w2"]


EXAMPLES = ArtifactRoundBody.examples | DistanceRoundBody.examples


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_bodies_are_accepted(client: TestClient, rounds: RoundStore, name: str) -> None:
    start(client, rounds, EXAMPLES[name]["value"])


# Refusing.


@pytest.mark.parametrize("path", ["init", "init/validate"])
def test_422_for_an_artifact_body_where_only_distance_rounds_are_stored(
    client: TestClient, path: str
) -> None:
    answer = client.post(f"{POW}/{path}", json=round_body())
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "r_target"]


@pytest.mark.parametrize("path", ["init/generate", "init", "init/validate"])
def test_413_for_a_body_that_no_round_needs(client: TestClient, path: str) -> None:
    answer = client.post(
        f"{POW}/{path}",
        content=b'{"x": [' + b"1," * 50_000 + b"1]}",
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 413
    assert "at most 65536 bytes" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("sent", "batch_size"),
    [
        (round_body(), 32),  # the default
        (round_body(batch_size=129), 129),
        (round_body(batch_size=5000), 5000),
        (round_body(batch_size=33, params={"seq_len": 256}), 33),
        (distance_body(batch_size=129), 129),
    ],
)
def test_a_batch_size_beyond_what_workers_hold_is_no_error(
    client: TestClient,
    rounds: RoundStore,
    serve: Callable[..., Any],
    sent: dict[str, Any],
    batch_size: int,
) -> None:
    serve("w1", max_batch_tokens=1024)
    assert start(client, rounds, sent).config.batch_size == batch_size


def test_503_for_any_name_while_no_worker_is_ready(
    client: TestClient, workers: WorkerRegistry, serve: Callable[..., Any]
) -> None:
    """As after a stop: 409 would name the model before, as if it were served."""
    serve("w2", model="other")
    for change in (lambda: serve("w1", state="starting"), lambda: workers.remove("w1")):
        workers.remove("w2")
        change()
        for sent in (round_body(params={"model": "never"}), distance_body(model="never")):
            answer = client.post(START, json=sent)
            assert (answer.status_code, int(answer.headers["Retry-After"]) > 0) == (503, True)
            assert MODEL not in answer.text
    assert client.post(START, json=distance_body()).status_code == 503  # which of the two?


def test_a_distance_client_names_no_model_unless_there_are_several(
    client: TestClient, rounds: RoundStore, serve: Callable[..., Any]
) -> None:
    serve("w2", model="other")
    answer = client.post(START, json=distance_body())
    assert answer.status_code == 409
    assert f"name one of other, {MODEL} as `model`" in answer.json()["detail"]
    assert start(client, rounds, distance_body(model="other")).config.model == "other"


@pytest.mark.parametrize("sent", [round_body(), distance_body()], ids=["artifacts", "distances"])
@pytest.mark.parametrize("path", ["init/generate", "init", "init/validate"])
def test_409_while_a_round_generates(
    client: TestClient, rounds: RoundStore, sent: dict[str, Any], path: str
) -> None:
    first = start(client, rounds, sent)
    answer = client.post(f"{POW}/{path}", json=distance_body(block_hash="another"))
    assert answer.status_code == 409
    for call in ("POST /api/v1/pow/stop", "POST /api/v1/pow/phase/validate"):
        assert call in answer.json()["detail"]
    assert current(rounds) == first


def test_a_refused_round_wakes_nobody(
    client: TestClient, rounds: RoundStore, dispatcher: RecordingDispatcher
) -> None:
    start(client, rounds)
    woken = list(dispatcher.each)
    client.post(START, json=round_body())
    assert dispatcher.each == woken


# Its own description.


@pytest.mark.parametrize(
    "path", ["init/generate", "init", "init/validate", "phase/generate", "phase/validate"]
)
def test_openapi_names_every_error_of(client: TestClient, path: str) -> None:
    responses = client.get("/openapi.json").json()["paths"][f"{POW}/{path}"]["post"]["responses"]
    expected = {"200", "400", "503"} if "phase" in path else {"200", "409", "413", "422", "503"}
    assert set(responses) >= expected


@pytest.mark.parametrize(
    ("model", "obvious"),
    [(ArtifactRoundBody, ["params"]), (DistanceRoundBody, []), (GenerateBody, ["params"])],
)
def test_every_body_field_but_the_obvious_is_described(
    model: type[BaseModel], obvious: list[str]
) -> None:
    bare = [name for name, field in model.model_fields.items() if not field.description]
    assert bare == obvious


@pytest.mark.parametrize("sent", [round_body(params={"model": "other"}), distance_body()])
def test_a_round_of_a_model_that_nobody_serves_any_more_does_not_prevent_the_next(
    client: TestClient, rounds: RoundStore, workers: WorkerRegistry, sent: dict[str, Any]
) -> None:
    first = start(client, rounds)
    workers.remove("w1")  # and the node is started with another model
    workers.heartbeat(worker_record("w2", "other"))
    second = start(client, rounds, sent)
    assert (second.config.model, second.state) == ("other", RoundState.GENERATING)
    stopped = known(rounds.read(first.round_id))
    assert stopped.state is RoundState.STOPPED
    assert stopped.error is not None
    assert MODEL in stopped.error
    assert rounds.generating(MODEL) is None


@pytest.mark.parametrize("state", ["ready", "starting"])
def test_a_round_of_a_model_that_somebody_serves_or_starts_prevents_others(
    client: TestClient,
    rounds: RoundStore,
    workers: WorkerRegistry,
    state: Literal["ready", "starting"],
) -> None:
    first = start(client, rounds)
    workers.heartbeat(worker_record("w1", state=state))
    workers.heartbeat(worker_record("w2", "other"))
    answer = client.post(START, json=round_body(params={"model": "other"}))
    assert answer.status_code == 409
    assert current(rounds) == first
