"""Rounds over HTTP: started, switched, looked at and stopped by both generations of clients."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel
from redis import Redis

from api.app import create_app
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.callbacks import callback_url
from poc_core.records import RoundRecord, RoundState
from poc_core.schemes.artifact.requests import ArtifactRoundBody, GenerateBody
from poc_core.schemes.distance.requests import DistanceRoundBody
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox, Receivers
from poc_core.state.parsing import BREAKS_AT
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    MODEL,
    Clock,
    RecordingDispatcher,
    body,
    complete_batch,
    complete_lease,
    distance_body,
    known,
    lease_batch,
    lease_nonces,
    leased,
    round_body,
)

pytestmark = pytest.mark.usefixtures("a_worker")

POW = "/api/v1/pow"
START = f"{POW}/init/generate"
URL = "http://receiver:9000/poc"
SECRET_URL = "http://user:s3cret@receiver:9000/poc"


def current(rounds: RoundStore) -> RoundRecord:
    return known(rounds.current())


def start(
    client: TestClient, rounds: RoundStore, sent: dict[str, Any] | None = None
) -> RoundRecord:
    answer = client.post(START, json=sent or round_body())
    assert answer.status_code == 200, answer.text
    return current(rounds)


def compute(
    rounds: RoundStore, places: int = 4, worker: str = "w1", values: list[Any] | None = None
) -> None:
    lease = leased(lease_nonces(rounds, current(rounds), worker, places))
    complete_lease(rounds, lease, worker, values or ["A" * 32] * places)


def status(client: TestClient) -> dict[str, Any]:
    answer = client.get(f"{POW}/status")
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


# Starting.


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


# Phases.


@pytest.mark.parametrize(
    ("path", "state"),
    [("init", RoundState.IDLE), ("init/validate", RoundState.VALIDATING)],
    ids=["stored", "validating"],
)
def test_a_round_may_begin_without_generating(
    client: TestClient,
    rounds: RoundStore,
    dispatcher: RecordingDispatcher,
    path: str,
    state: RoundState,
) -> None:
    answer = client.post(f"{POW}/{path}", json=distance_body())
    assert answer.json() == {"status": "OK", "pow_status": {"status": state.value}}
    assert (current(rounds).state, rounds.generating(MODEL), dispatcher.each) == (state, None, [])


def test_a_stored_round_is_switched_to_and_fro(
    client: TestClient, rounds: RoundStore, dispatcher: RecordingDispatcher
) -> None:
    client.post(f"{POW}/init", json=distance_body())
    for phase, state in [("generate", "GENERATING"), ("validate", "VALIDATING")] * 2:
        answer = client.post(f"{POW}/phase/{phase}", json={})
        assert answer.status_code == 200
        assert answer.json()["pow_status"]["status"] == current(rounds).state.value == state
    assert dispatcher.each == ["w1", "w1"]  # with each generating phase


@pytest.mark.parametrize("phase", ["generate", "validate"])
def test_400_for_a_phase_before_any_init_and_after_the_stop(
    client: TestClient, rounds: RoundStore, phase: str
) -> None:
    before = client.post(f"{POW}/phase/{phase}", json={})
    assert (before.status_code, "send POST /init first" in before.json()["detail"]) == (400, True)
    start(client, rounds)
    client.post(f"{POW}/stop")
    after = client.post(f"{POW}/phase/{phase}", json={})
    assert (after.status_code, "was stopped" in after.json()["detail"]) == (400, True)


# Looking.


def test_the_states_are_those_of_the_protocol(client: TestClient) -> None:
    seen = [status(client)["state"]]
    for path, sent in [
        ("init", distance_body()),
        ("phase/generate", {}),
        ("phase/validate", {}),
        ("stop", None),
        ("init/generate", round_body()),
        ("stop", None),
    ]:
        assert client.post(f"{POW}/{path}", json=sent).status_code == 200
        answer = status(client)
        # In the network's words a round that was stopped is none.
        wanted = "IDLE" if answer["state"] == "STOPPED" else answer["state"]
        assert answer["status"] == wanted
        assert client.get("/api/v1/state").json()["poc_status"] == wanted
        seen.append(answer["state"])
    assert seen == ["IDLE", "IDLE", "GENERATING", "VALIDATING", "STOPPED", "GENERATING", "STOPPED"]


@pytest.mark.parametrize(
    ("sent", "added"),
    [
        (round_body(url=URL, node_id=1, node_count=2, batch_size=16), {"poc_stronger_rng": False}),
        (
            distance_body(callback_url=URL, batch_size=16, fraud_threshold=0.05),
            {"model": MODEL, "use_sign_flips": True, "use_layer_hooks": False},
        ),
    ],
    ids=["artifacts", "distances"],
)
def test_the_status_shows_a_rounds_config_in_its_own_words(
    client: TestClient, rounds: RoundStore, sent: dict[str, Any], added: dict[str, Any]
) -> None:
    start(client, rounds, sent)
    assert status(client)["config"] == sent | {"group_id": 0, "n_groups": 1} | added


def test_the_status_counts_per_worker_and_in_sum(
    client: TestClient, rounds: RoundStore, clock: Clock, serve: Callable[..., Any]
) -> None:
    serve("w2")
    start(client, rounds)
    clock.now += 15
    compute(rounds, 20, "w1")
    compute(rounds, 10, "w2")
    clock.now += 5
    stats = status(client)["stats"]
    assert (stats["total_processed"], stats["elapsed_seconds"]) == (30, 20)
    assert (stats["nonces_per_second"], stats["nonces_per_second_of_round"]) == (3.0, 1.5)
    assert stats["workers"] == {
        "w1": {"total_processed": 20, "nonces_per_second": 2.0},
        "w2": {"total_processed": 10, "nonces_per_second": 1.0},
    }


def test_the_status_names_excluded_nonces(client: TestClient, rounds: RoundStore) -> None:
    start(client, rounds)
    compute(rounds, 3, values=["a", None, "c"])
    stats = status(client)["stats"]
    assert (stats["n_excluded"], stats["excluded_nonces"]) == (1, [1])


def test_the_status_tells_what_is_delivered_and_what_waits(
    client: TestClient, rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings
) -> None:
    record = start(client, rounds, round_body(url=URL))
    compute(rounds, 4)
    clock.now += settings.callback_interval_sec
    delivery = known(outbox.take(record.round_id))
    outbox.delivered(delivery)
    compute(rounds, 3)
    stats = status(client)["stats"]
    assert (stats["artifacts_delivered"], stats["artifacts_waiting"]) == (4, 3)
    assert stats["outbox"]["full"] is False
    assert stats["outbox"]["limit_bytes"] == settings.outbox_max_bytes


def test_the_status_tells_of_a_receiver_that_fails(
    client: TestClient, rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings
) -> None:
    record = start(client, rounds, round_body(url=URL))
    compute(rounds, 4)
    clock.now += settings.callback_interval_sec
    delivery = known(outbox.take(record.round_id))
    wait_s = outbox.failed(delivery, "it answered 500")
    told = status(client)["stats"]["outbox"]
    assert (told["failures"], told["last_error"], told["dropped"]) == (1, "it answered 500", 0)
    assert told["next_try_at"] == pytest.approx(clock.now + wait_s)


@pytest.mark.parametrize(
    "sent", [round_body(url=SECRET_URL), distance_body(callback_url=SECRET_URL)]
)
def test_a_callback_urls_secret_is_in_no_answer(
    client: TestClient, rounds: RoundStore, sent: dict[str, Any]
) -> None:
    assert start(client, rounds, sent).config.url == SECRET_URL
    for path in (f"{POW}/status", "/api/v1/inference/pow/status", "/metrics"):
        assert "s3cret" not in client.get(path).text
    assert "http://***@receiver:9000/poc" in status(client)["config"].values()


def test_the_status_names_receivers_that_do_not_answer(
    client: TestClient, redis: Redis, clock: Clock, settings: Settings
) -> None:
    assert status(client)["silent_receivers"] == []
    for _ in range(BREAKS_AT):
        Receivers(redis, clock).silent("receiver:9000")
    ((told),) = status(client)["silent_receivers"]
    assert (told["receiver"], told["failures"]) == ("receiver:9000", BREAKS_AT)
    assert clock.now < told["next_try_at"] <= clock.now + 2


class TestWithFewBytes:
    @pytest.fixture
    def settings(self) -> Settings:
        return Settings(outbox_max_bytes=1024)

    def test_the_status_says_that_the_outbox_is_full(
        self, client: TestClient, rounds: RoundStore
    ) -> None:
        start(client, rounds, round_body(url=URL))
        compute(rounds, 40)
        told = status(client)["stats"]["outbox"]
        assert told["bytes"] > told["limit_bytes"] == 1024
        assert told["full"] is True


def test_the_status_tells_why_a_round_stopped_by_itself(
    client: TestClient, rounds: RoundStore
) -> None:
    rounds.switch(start(client, rounds), RoundState.STOPPED, "The model has no layers.")
    answer = status(client)
    assert (answer["state"], answer["stats"]["error"]) == ("STOPPED", "The model has no layers.")


def test_the_clock_of_a_stopped_round_stands_and_it_has_no_rate_of_now(
    client: TestClient, rounds: RoundStore, clock: Clock
) -> None:
    start(client, rounds)
    compute(rounds, 30)
    clock.now += 10
    client.post(f"{POW}/stop")
    stats = status(client)["stats"]
    assert (stats["nonces_per_second"], stats["workers"]["w1"]["nonces_per_second"]) == (0, 0)
    clock.now += 5
    stats = status(client)["stats"]
    assert (stats["elapsed_seconds"], stats["nonces_per_second_of_round"]) == (10, 3.0)


def test_a_round_that_never_ran_has_not_lasted(client: TestClient, clock: Clock) -> None:
    client.post(f"{POW}/init", json=distance_body())
    clock.now += 5
    client.post(f"{POW}/stop")
    clock.now += 5
    stats = status(client)["stats"]
    assert (stats["elapsed_seconds"], stats["nonces_per_second_of_round"]) == (0, 0)


def test_the_status_of_a_distance_round_has_its_fields_beside(
    client: TestClient, rounds: RoundStore, clock: Clock
) -> None:
    start(client, rounds, distance_body())
    compute(rounds, 4, values=[1.39, 1.5, 1.41, 1.25])
    clock.now += 2
    answer = status(client)
    assert (answer["valid_nonces"], answer["valid_distances"]) == ([0, 3], [1.39, 1.25])
    assert (answer["total_checked"], answer["total_valid"], answer["r_target"]) == (4, 2, 1.405)
    assert (answer["elapsed_seconds"], answer["rate_per_second"]) == (2, 2.0)


def test_the_status_of_a_distance_round_does_not_grow_without_end(
    client: TestClient, rounds: RoundStore
) -> None:
    record = start(client, rounds, distance_body())
    for _ in range(25):
        compute(rounds, 1000, values=[1.25] * 1000)
    answer = status(client)
    assert (len(answer["valid_nonces"]), len(answer["valid_distances"])) == (10_000, 10_000)
    assert (answer["valid_from"], answer["total_valid"]) == (15_000, 25_000)
    assert answer["valid_nonces"][-1] == 24_999
    assert rounds.reported(record.round_id).first == 15_000


def test_what_the_status_does_not_list_is_had_page_by_page(
    client: TestClient, rounds: RoundStore
) -> None:
    start(client, rounds, distance_body())
    compute(rounds, 8, values=[1.39, 1.5, 1.41, 1.25, 1.2, 1.6, 1.1, 1.0])
    found, at = [], 0
    while at < status(client)["total_valid"]:
        answer = client.get(f"{POW}/status", params={"valid_from": at, "valid_limit": 2}).json()
        assert answer["valid_from"] == at
        found += list(zip(answer["valid_nonces"], answer["valid_distances"], strict=True))
        at += len(answer["valid_nonces"])
    assert found == [(0, 1.39), (3, 1.25), (4, 1.2), (6, 1.1), (7, 1.0)]


@pytest.mark.parametrize(
    "query",
    ["valid_from=-1", "valid_from=x", "valid_from=1e9", "valid_limit=10001", "valid_limit=0"],
)
def test_422_for_a_page_that_cannot_be(client: TestClient, query: str) -> None:
    answer = client.get(f"{POW}/status?{query}")
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["query", query.split("=")[0]]


def test_the_status_says_that_a_sequence_has_ended(client: TestClient, rounds: RoundStore) -> None:
    start(client, rounds, round_body(node_count=2**62))
    assert status(client)["stats"]["exhausted"] is False
    compute(rounds, 4, values=["a", "b"])
    answer = status(client)
    assert answer["state"] == "STOPPED"
    assert (answer["stats"]["exhausted"], answer["stats"]["total_processed"]) == (True, 2)
    assert client.get("/api/v1/inference/pow/status").json()["status"] == "IDLE"


def test_the_status_before_any_round_has_every_field_that_it_has_after(
    client: TestClient, rounds: RoundStore
) -> None:
    before = status(client)
    assert (before["state"], before["config"]) == ("IDLE", None)
    for sent in (round_body(), distance_body()):
        start(client, rounds, sent)
        after = status(client)
        assert after.keys() <= before.keys()
        assert after["stats"].keys() == before["stats"].keys()
        assert after["stats"]["outbox"].keys() == before["stats"]["outbox"].keys()
        assert ("valid_nonces" in after) is ("r_target" in sent)
        client.post(f"{POW}/stop")


# Stopping.


def test_stop_ends_the_round(client: TestClient, rounds: RoundStore) -> None:
    record = start(client, rounds)
    answer = client.post(f"{POW}/stop")
    assert answer.json() == {
        "status": "OK",
        "pow_status": {"status": "STOPPED"},
        "cancelled_jobs": 0,
    }
    assert current(rounds).round_id == record.round_id
    assert current(rounds).state is RoundState.STOPPED
    assert rounds.generating(MODEL) is None
    assert client.post(f"{POW}/stop").status_code == 200
    assert start(client, rounds).round_id != record.round_id


def test_stop_may_come_when_nothing_runs(client: TestClient) -> None:
    assert client.post(f"{POW}/stop").status_code == 200


def test_stop_cancels_the_jobs_that_waited_for_the_round(
    client: TestClient, rounds: RoundStore
) -> None:
    start(client, rounds)
    job_id = client.post(f"{POW}/generate", json=body()).json()["request_id"]
    assert client.post(f"{POW}/stop").json()["cancelled_jobs"] == 1
    assert client.get(f"{POW}/generate/{job_id}").json()["status"] == "cancelled"


def test_the_round_outlives_the_api(
    client: TestClient,
    rounds: RoundStore,
    redis: Redis,
    settings: Settings,
    dispatcher: RecordingDispatcher,
    clock: Clock,
) -> None:
    start(client, rounds)
    compute(rounds, 4)
    before = status(client)
    restarted = create_app(services=Services(settings, redis, cast(Dispatcher, dispatcher), clock))
    assert status(TestClient(restarted)) == before


# Jobs beside a round.


def test_a_job_is_accepted_during_a_round(
    client: TestClient, rounds: RoundStore, jobs: JobStore
) -> None:
    start(client, rounds)
    answer = client.post(f"{POW}/generate", json=body())
    assert (answer.status_code, answer.json()["status"]) == (200, "queued")
    assert status(client)["queued_nonces"] == 3


@pytest.fixture
def a_stop_after_1_s(
    rounds: RoundStore, jobs: JobStore, waiting_time: Any
) -> Iterator[Callable[[], None]]:
    """Ends the round after twice generate_chunk_timeout_sec, then computes the job that waited."""

    def end_then_compute() -> None:
        waiting_time.pass_by(1.0)
        rounds.switch(current(rounds), RoundState.STOPPED)
        (job_id,) = jobs.active_jobs(MODEL)
        lease = leased(lease_batch(jobs, job_id, 0, "w1"))
        complete_batch(jobs, job_id, 0, ["A" * 32 for _ in lease.nonces])
        jobs.finish(job_id)

    thread = threading.Thread(target=end_then_compute, daemon=True)
    yield thread.start
    thread.join()


CLAIMS = {"artifacts": [{"nonce": nonce, "vector_b64": "A" * 32} for nonce in (0, 1, 2)]}
WAITING = pytest.mark.parametrize("claims", [{}, {"validation": CLAIMS}], ids=["compute", "judge"])


@WAITING
def test_waiting_lasts_over_a_round_however_long_and_then_has_the_result(
    client: TestClient,
    rounds: RoundStore,
    a_stop_after_1_s: Callable[[], None],
    claims: dict[str, Any],
) -> None:
    start(client, rounds)
    a_stop_after_1_s()
    answer = client.post(f"{POW}/generate", json=body(wait=True, **claims))
    assert (answer.status_code, answer.json()["status"]) == (200, "completed")
    assert answer.json()["n_mismatch" if claims else "encoding"] is not None


@WAITING
def test_what_a_client_waits_at_most_counts_from_the_rounds_end(
    client: TestClient, rounds: RoundStore, jobs: JobStore, claims: dict[str, Any]
) -> None:
    start(client, rounds)
    ended_at: list[float] = []

    def end() -> None:
        time.sleep(1.0)  # twice generate_chunk_timeout_sec
        ended_at.append(time.monotonic())
        rounds.switch(current(rounds), RoundState.STOPPED)

    thread = threading.Thread(target=end)
    thread.start()
    answer = client.post(f"{POW}/generate", json=body(wait=True, **claims))
    thread.join()
    assert time.monotonic() - ended_at[0] >= 0.5
    assert answer.status_code == 503
    assert "No batch was done within 0.5 s" in answer.json()["detail"]
    assert jobs.active_jobs(MODEL) == []


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
