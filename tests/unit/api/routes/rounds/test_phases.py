"""A round is switched and stopped; jobs continue during a round."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.app import create_app
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.records import RoundState
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.rounds import RoundStore
from tests.harness.round_routes import POW, compute, current, start, status
from tests.harness.samples import (
    MODEL,
    Clock,
    RecordingDispatcher,
    body,
    complete_batch,
    distance_body,
    lease_batch,
    leased,
    work_of,
)

pytestmark = pytest.mark.usefixtures("a_worker")


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


def test_stop_cancels_them_before_a_worker_can_start_them(
    client: TestClient, rounds: RoundStore, jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = RoundStore.switch

    def switch_beside_a_worker(*args: Any) -> RoundState | None:
        before = switch(*args)
        assert work_of(jobs).lease(MODEL) == []
        return before

    monkeypatch.setattr(RoundStore, "switch", switch_beside_a_worker)
    start(client, rounds)
    client.post(f"{POW}/generate", json=body())
    assert client.post(f"{POW}/stop").json()["cancelled_jobs"] == 1


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
