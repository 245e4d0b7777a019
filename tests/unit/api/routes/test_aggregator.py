"""What aggregators of the network call and read: rounds and jobs with one entry per worker."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from poc_core.records import RoundRecord, RoundState
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    MODEL,
    Clock,
    RecordingDispatcher,
    body,
    complete_lease,
    distance_body,
    known,
    lease_nonces,
    leased,
    round_body,
)

POW = "/api/v1/inference/pow"

Serve = Callable[..., Any]


def ports(answer: dict[str, Any], of: str = "results") -> list[int]:
    return [entry["port"] for entry in answer[of]]


def current(rounds: RoundStore) -> RoundRecord:
    return known(rounds.current())


def compute(rounds: RoundStore, worker: str, places: int) -> None:
    lease = leased(lease_nonces(rounds, current(rounds), worker, places))
    complete_lease(rounds, lease, worker, ["A" * 32] * places)


@pytest.fixture
def two_workers(serve: Serve) -> None:
    serve("w1")
    serve("w2")


# Starting.


@pytest.mark.usefixtures("two_workers")
def test_a_start_is_answered_with_one_result_per_worker(client: TestClient) -> None:
    answer = client.post(f"{POW}/init/generate", json=round_body()).json()
    first, second = ports(answer)
    assert first != second
    assert answer == {
        "status": "OK",
        "backends": 2,
        "n_groups": 2,
        "results": [{"port": first, "status": "OK"}, {"port": second, "status": "OK"}],
        "errors": None,
    }


@pytest.mark.usefixtures("two_workers")
def test_a_start_starts_the_same_round_as_the_nodes_own_path(
    client: TestClient, rounds: RoundStore, dispatcher: RecordingDispatcher
) -> None:
    client.post(f"{POW}/init/generate", json=round_body(node_id=1, node_count=3))
    record = current(rounds)
    assert record.state is RoundState.GENERATING
    assert (record.config.node_id, record.config.node_count, record.config.n_groups) == (1, 3, 1)
    assert dispatcher.each == ["w1", "w2"]
    assert client.get("/api/v1/pow/status").json()["state"] == "GENERATING"


def test_workers_of_another_model_and_those_that_load_are_not_among_the_backends(
    client: TestClient, serve: Serve
) -> None:
    serve("w1")
    serve("w2", model="other")
    serve("w3", state="starting")
    assert client.post(f"{POW}/init/generate", json=round_body()).json()["backends"] == 1


def test_a_worker_that_serves_chat_is_known_by_that_port(
    client: TestClient, serve: Serve, workers: WorkerRegistry
) -> None:
    workers.heartbeat(replace(serve("w1"), port=5005))
    assert ports(client.post(f"{POW}/init/generate", json=round_body()).json()) == [5005]


def test_a_distance_round_starts_here_too(
    client: TestClient, rounds: RoundStore, serve: Serve
) -> None:
    serve("w1")
    assert client.post(f"{POW}/init/generate", json=distance_body()).json()["backends"] == 1
    assert current(rounds).config.terms["r_target"] == 1.405


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (round_body(node_id=1, node_count=1), 422),
        (round_body(url="ftp://host"), 422),
        (round_body(batch_size=-1), 422),
        (round_body(params={"model": "unknown"}), 409),
    ],
)
def test_a_start_is_refused_as_on_the_nodes_own_path(
    client: TestClient, rounds: RoundStore, serve: Serve, sent: dict[str, Any], code: int
) -> None:
    serve("w1")
    answer = client.post(f"{POW}/init/generate", json=sent)
    assert answer.status_code == code
    assert answer.json() == client.post("/api/v1/pow/init/generate", json=sent).json()
    assert rounds.current() is None


def test_503_without_any_worker(client: TestClient) -> None:
    answer = client.post(f"{POW}/init/generate", json=round_body())
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0


# Status.


@pytest.mark.usefixtures("two_workers")
def test_without_a_round_all_backends_are_idle(client: TestClient) -> None:
    answer = client.get(f"{POW}/status").json()
    assert answer["status"] == "IDLE"
    idle = {
        "status": "IDLE",
        "config": None,
        "stats": {"total_processed": 0, "nonces_per_second": 0.0},
    }
    assert [entry | {"port": 0} for entry in answer["backends"]] == [idle | {"port": 0}] * 2


def test_without_workers_there_are_no_backends(client: TestClient, serve: Serve) -> None:
    serve("w1", state="starting")
    assert client.get(f"{POW}/status").json() == {"status": "NO_BACKENDS", "backends": []}


@pytest.mark.usefixtures("two_workers")
def test_in_a_round_every_backend_has_its_own_numbers(
    client: TestClient, rounds: RoundStore, clock: Clock
) -> None:
    client.post(f"{POW}/init/generate", json=round_body())
    clock.now += 100
    compute(rounds, "w1", 20)
    compute(rounds, "w2", 10)
    clock.now += 1
    answer = client.get(f"{POW}/status").json()
    assert answer["status"] == "GENERATING"
    assert [(backend["status"], backend["stats"]) for backend in answer["backends"]] == [
        ("GENERATING", {"total_processed": 20, "nonces_per_second": 2.0}),
        ("GENERATING", {"total_processed": 10, "nonces_per_second": 1.0}),
    ]


@pytest.mark.usefixtures("two_workers")
def test_a_worker_that_joins_late_is_a_backend_with_nothing_done(
    client: TestClient, serve: Serve
) -> None:
    client.post(f"{POW}/init/generate", json=round_body())
    serve("w3")
    answer = client.get(f"{POW}/status").json()
    assert (answer["status"], len(answer["backends"])) == ("GENERATING", 3)
    assert answer["backends"][2]["stats"] == {"total_processed": 0, "nonces_per_second": 0.0}


@pytest.mark.usefixtures("two_workers")
def test_a_worker_that_died_is_no_backend(client: TestClient, workers: WorkerRegistry) -> None:
    client.post(f"{POW}/init/generate", json=round_body())
    workers.remove("w1")
    assert len(client.get(f"{POW}/status").json()["backends"]) == 1


def test_backends_that_differ_are_mixed(client: TestClient, serve: Serve) -> None:
    serve("w1")
    serve("w2", model="other")
    client.post(f"{POW}/init/generate", json=round_body())
    answer = client.get(f"{POW}/status").json()
    assert answer["status"] == "MIXED"
    assert [(backend["status"], backend["config"] is None) for backend in answer["backends"]] == [
        ("GENERATING", False),
        ("IDLE", True),
    ]


# Stopping.


@pytest.mark.usefixtures("two_workers")
def test_a_stop_is_answered_with_one_result_per_worker_and_all_are_idle(
    client: TestClient, rounds: RoundStore
) -> None:
    sent = round_body(url="http://receiver:9000/poc", batch_size=16)
    started = ports(client.post(f"{POW}/init/generate", json=sent).json())
    job_id = client.post(f"{POW}/generate", json=body()).json()["request_id"]
    refused = client.post(f"{POW}/init/generate", json=round_body())
    assert refused.status_code == 409
    assert "generating already" in refused.json()["detail"]
    seen = client.get(f"{POW}/status").json()
    config = sent | {"group_id": 0, "n_groups": 1, "poc_stronger_rng": False}
    assert [backend["config"] for backend in seen["backends"]] == [config] * 2
    assert ports(seen, of="backends") == started
    assert client.post(f"{POW}/stop").json() == {
        "status": "OK",
        "results": [{"port": port, "status": "stopped"} for port in started],
        "errors": None,
    }
    assert current(rounds).state is RoundState.STOPPED
    assert client.get(f"{POW}/generate/{job_id}").json()["status"] == "cancelled"
    seen = client.get(f"{POW}/status").json()
    assert (seen["status"], [one["status"] for one in seen["backends"]]) == ("IDLE", ["IDLE"] * 2)


def test_a_stop_without_workers_ends_the_round_all_the_same(
    client: TestClient, rounds: RoundStore, workers: WorkerRegistry, serve: Serve
) -> None:
    serve("w1")
    client.post(f"{POW}/init/generate", json=round_body())
    workers.remove("w1")
    assert client.post(f"{POW}/stop").json() == {"status": "OK", "results": [], "errors": None}
    assert current(rounds).state is RoundState.STOPPED


# Jobs.


@pytest.mark.usefixtures("two_workers")
def test_a_job_is_the_same_under_both_families_of_paths(client: TestClient, jobs: JobStore) -> None:
    queued = client.post(f"{POW}/generate", json=body()).json()
    assert (queued["status"], queued["queued_count"]) == ("queued", 3)
    here = client.get(f"{POW}/generate/{queued['request_id']}").json()
    assert here == client.get(f"/api/v1/pow/generate/{queued['request_id']}").json()
    assert jobs.active_jobs(MODEL) == [queued["request_id"]]


def test_an_unknown_job_is_404(client: TestClient) -> None:
    assert client.get(f"{POW}/generate/{'0' * 32}").status_code == 404
