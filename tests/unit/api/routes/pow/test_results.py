"""A job's progress, result and verdict, for a client that polls or waits."""

import base64
import itertools
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from anyio import to_thread
from fastapi.testclient import TestClient
from redis import ConnectionError, Redis, RedisError, TimeoutError

from poc_core.records import JobKind, JobRecord
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.pow_routes import GENERATE, VECTOR, compute, record_of, submit
from tests.harness.samples import K_DIM, MODEL, Clock, body, complete_batch, lease_batch
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.usefixtures("a_worker")


class Worker(threading.Thread):
    """Does to the first job that appears what `step` says, beside a client that waits."""

    def __init__(self, jobs: JobStore, step: Callable[[str], object]) -> None:
        super().__init__(daemon=True)
        self.jobs, self.step = jobs, step

    def run(self) -> None:
        wait_until(lambda: self.jobs.active_jobs(MODEL), "a job")
        self.step(self.jobs.active_jobs(MODEL)[0])


def test_a_job_tells_its_progress_and_then_its_result(
    client: TestClient, jobs: JobStore, clock: Any
) -> None:
    job_id = submit(client, nonces=[5, 6, 7], batch_size=2)
    queued = {
        "status": "queued",
        "request_id": job_id,
        "model": MODEL,
        "n_total": 3,
        "n_done": 0,
        "created_at": clock.now,
    }
    assert client.get(f"{GENERATE}/{job_id}").json() == queued
    compute(jobs, job_id, 0)
    running = queued | {"status": "running", "n_done": 2, "started_at": clock.now}
    assert client.get(f"{GENERATE}/{job_id}").json() == running
    compute(jobs, job_id, 1)
    assert client.get(f"{GENERATE}/{job_id}").json() == {
        "status": "completed",
        "request_id": job_id,
        "artifacts": [{"nonce": nonce, "vector_b64": VECTOR} for nonce in (5, 6, 7)],
        "encoding": {"dtype": "f16", "k_dim": K_DIM, "endian": "le"},
    }


def test_a_validation_answers_with_a_verdict(client: TestClient, jobs: JobStore) -> None:
    artifacts = [{"nonce": nonce, "vector_b64": VECTOR} for nonce in (1, 0)]
    stat_test = {"dist_threshold": 0.1, "p_mismatch": 0.5, "p_value_threshold": 0.2}
    job_id = submit(client, nonces=[0, 1], validation={"artifacts": artifacts}, stat_test=stat_test)
    record = record_of(jobs, job_id)
    assert record.kind is JobKind.VALIDATE
    assert record.request.terms == {
        "dist_threshold": 0.1,
        "p_mismatch": 0.5,
        "fraud_threshold": 0.01,
        "source": "the request",
    }
    compute(jobs, job_id, 0)
    assert client.get(f"{GENERATE}/{job_id}").json() == {
        "status": "completed",
        "request_id": job_id,
        "n_total": 2,
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "fraud_detected": False,
        "fraud_threshold": 0.01,
        "n_excluded": 0,
        "dist_threshold": 0.1,
        "p_mismatch": 0.5,
        "terms": "the request",
        "distances": {"min": 0.0, "median": 0.0, "max": 0.0, "histogram": [[0.0001, 2]]},
        "likely_cause": None,
    }


class TestHonouringPValueThreshold:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"honour_p_value_threshold": True})

    def test_judges_by_what_the_chain_says(self, client: TestClient, jobs: JobStore) -> None:
        validation = {"artifacts": [{"nonce": 0, "vector_b64": VECTOR}]}
        job_id = submit(
            client, nonces=[0], validation=validation, stat_test={"p_value_threshold": 0.05}
        )
        compute(jobs, job_id, 0)
        assert client.get(f"{GENERATE}/{job_id}").json()["fraud_threshold"] == 0.05


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}e", *numbers)).decode()


MALFORMED_VECTORS: dict[str, Any] = {
    "no base64": "??",
    "not ASCII": "é" * 32,
    "a number": 5,
    "null": None,
    "a list": ["A" * 32],
    "empty": "",
    "too short": packed(1.0),
    "too long": packed(*[1.0] * (K_DIM + 1)),
    "of a megabyte": "A" * 150_000,
    "with blanks": " " + VECTOR[1:],
    "with NaN": packed(*[0.0] * (K_DIM - 1), float("nan")),
    "with a signalling NaN": base64.b64encode(b"\x01\x7c" + bytes(2 * K_DIM - 2)).decode(),
    "with infinity": packed(*[0.0] * (K_DIM - 1), float("-inf")),
}


@pytest.mark.parametrize("case", [*MALFORMED_VECTORS, "missing"])
def test_a_received_vector_is_a_mismatch_that_is(
    client: TestClient, jobs: JobStore, case: str
) -> None:
    bad = {"vector_b64": MALFORMED_VECTORS[case]} if case != "missing" else {}
    artifacts = [{"nonce": 0} | bad, {"nonce": 1, "vector_b64": VECTOR}]
    job_id = submit(client, nonces=[0, 1], validation={"artifacts": artifacts})
    compute(jobs, job_id, 0)
    answer = client.get(f"{GENERATE}/{job_id}").json()
    assert (answer["status"], answer["n_total"], answer["mismatch_nonces"]) == ("completed", 2, [0])


def test_a_received_vector_of_a_megabyte_takes_no_memory(client: TestClient, redis: Redis) -> None:
    claims = {"artifacts": [{"nonce": 0, "vector_b64": "A" * 150_000}]}
    job_id = submit(client, nonces=[0], validation=claims)
    assert redis.hget(f"poc:job:{job_id}:claimed", "0") == b'""'


@pytest.mark.parametrize("n", [1, 3])  # one: without a verdict on n_total 0, a vote for fraud
def test_waiting_for_a_verdict_that_too_few_values_allow_is_503(
    client: TestClient, jobs: JobStore, redis: Redis, n: int
) -> None:
    def exclude_all(job_id: str) -> None:
        lease_batch(jobs, job_id, 0, "w1")
        complete_batch(jobs, job_id, 0, [None] * n)
        jobs.finish(job_id)

    Worker(jobs, exclude_all).start()
    nonces = list(range(n))
    claims = {"artifacts": [{"nonce": nonce, "vector_b64": VECTOR} for nonce in nonces]}
    sent = body(wait=True, nonces=nonces, validation=claims, url="http://receiver:9100/poc")
    answer = client.post(GENERATE, json=sent)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
    assert answer.json()["detail"]["error"] == "no_verdict"
    assert redis.zcard(keys.OUTBOX_DUE) == 0  # nor is there one for the receiver
    found = client.get(f"{GENERATE}/{answer.json()['detail']['request_id']}").json()
    assert (found["status"], "too many for a verdict" in found["error"]) == ("failed", True)


def test_a_failed_job_tells_its_error(client: TestClient, jobs: JobStore) -> None:
    job_id = submit(client)
    jobs.fail(job_id, "three engines were lost")
    answer = client.get(f"{GENERATE}/{job_id}")
    assert answer.status_code == 200
    assert answer.json()["status"] == "failed"
    assert answer.json()["error"] == "three engines were lost"


@pytest.mark.parametrize("request_id", ["0" * 32, "unknown", "%00", "x" * 5000, "%ED%A0%80"])
def test_an_unknown_request_id_is_404(client: TestClient, request_id: str) -> None:
    answer = client.get(f"{GENERATE}/{request_id}")
    assert answer.status_code == 404
    assert "kept for 300 s" in answer.json()["detail"]


def test_an_expired_result_is_404(client: TestClient, redis: Redis) -> None:
    job_id = submit(client)
    redis.delete(f"poc:job:{job_id}")
    assert client.get(f"{GENERATE}/{job_id}").status_code == 404


def test_waiting_answers_with_the_result(client: TestClient, jobs: JobStore) -> None:
    Worker(jobs, lambda job_id: compute(jobs, job_id, 0)).start()
    answer = client.post(GENERATE, json=body(wait=True))
    assert answer.status_code == 200
    assert answer.json()["status"] == "completed"
    assert [artifact["nonce"] for artifact in answer.json()["artifacts"]] == [0, 1, 2]


def test_waiting_lasts_as_long_as_batches_are_done(
    client: TestClient, jobs: JobStore, waiting_time: Any
) -> None:
    def slowly(job_id: str) -> None:
        for index in range(3):
            waiting_time.pass_by(0.4)  # of the 0.5 s that a batch may take
            compute(jobs, job_id, index)

    Worker(jobs, slowly).start()
    assert client.post(GENERATE, json=body(wait=True, batch_size=1)).json()["status"] == "completed"


def test_waiting_in_the_queue_lasts_as_long_as_others_are_computed(
    client: TestClient, jobs: JobStore, waiting_time: Any
) -> None:
    other = submit(client, nonces=list(range(4)), batch_size=1)

    def others_first(_: str) -> None:
        for index in range(4):
            waiting_time.pass_by(0.4)
            compute(jobs, other, index)
        (mine,) = jobs.active_jobs(MODEL)
        compute(jobs, mine, 0)

    Worker(jobs, others_first).start()
    assert client.post(GENERATE, json=body(wait=True)).json()["status"] == "completed"


def test_waiting_in_vain_is_503_and_the_job_is_cancelled(
    client: TestClient, jobs: JobStore
) -> None:
    answer = client.post(GENERATE, json=body(wait=True))
    assert answer.status_code == 503
    assert "No batch was done within 0.5 s" in answer.json()["detail"]
    assert int(answer.headers["Retry-After"]) > 0
    assert jobs.active_jobs(MODEL) == []


def test_waiting_for_chat_lasts_as_long_as_a_worker_lives(
    client: TestClient,
    jobs: JobStore,
    workers: WorkerRegistry,
    waiting_time: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that died says no longer that the job goes on."""

    def wait_for_chat(job_id: str) -> None:
        jobs.note_waiting([job_id], "chat")
        for _ in range(3):
            waiting_time.pass_by(0.6)  # of the 0.5 s that a batch may take
        assert record_of(jobs, job_id).waiting_for == "chat"
        workers.remove("w1")
        monkeypatch.setattr(waiting_time, "_now", 60.0)

    Worker(jobs, wait_for_chat).start()
    answer = client.post(GENERATE, json=body(wait=True))
    assert (answer.status_code, jobs.active_jobs(MODEL)) == (503, [])


def test_waiting_answers_with_a_result_that_comes_as_the_time_ends(
    client: TestClient, jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(store: JobStore, job_id: str) -> bool:
        compute(jobs, job_id, 0)
        return cancel(store, job_id)

    cancel = JobStore.cancel
    monkeypatch.setattr(JobStore, "cancel", too_late)
    assert client.post(GENERATE, json=body(wait=True)).json()["status"] == "completed"


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        (lambda jobs, job_id: jobs.fail(job_id, "3 engines"), 500, {"message": "3 engines"}),
        (JobStore.cancel, 409, {"error": "cancelled"}),
    ],
    ids=["fails", "is cancelled"],
)
def test_waiting_for_a_job_that(
    client: TestClient,
    jobs: JobStore,
    end: Callable[[JobStore, str], object],
    status: int,
    told: dict[str, str],
) -> None:
    Worker(jobs, lambda job_id: end(jobs, job_id)).start()
    answer = client.post(GENERATE, json=body(wait=True))
    assert answer.status_code == status
    assert answer.json()["detail"].items() >= told.items()


@pytest.mark.parametrize(
    ("error", "read_s", "n_clients", "pause_s"),
    [
        (ConnectionError("no primary"), 0.0, 240, 12.0),
        (ConnectionError("no primary"), 0.5, 240, 12.0),
        (TimeoutError("a silent host"), 5.0, 30, 15.0),
        (TimeoutError("a silent host"), 5.0, 240, 20.0),  # at most OUTLASTED_S
    ],
)
def test_waiting_outlasts_a_short_outage_of_redis(
    client: TestClient,
    jobs: JobStore,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    error: RedisError,
    read_s: float,
    n_clients: int,
    pause_s: float,
) -> None:
    """The job goes on: a client that was sent away would have it computed twice. 240 clients that
    wait look at Redis 20 times a second together, and less often if Redis is silent.
    """
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    def failing(store: JobStore, job_id: str) -> JobRecord | None:
        if outage:
            clock.now += read_s
            raise outage.pop()
        monkeypatch.setattr(JobStore, "read", read)
        compute(jobs, job_id, 0)
        return read(store, job_id)

    outage, read = [error] * 3, JobStore.read
    monkeypatch.setattr("api.errors.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(JobStore, "read", failing)
    monkeypatch.setattr("api.proofs.waiting.anyio.sleep", sleep)
    client.app.state.services.inline.n_waiting = n_clients - 1  # type: ignore[attr-defined]
    assert client.post(GENERATE, json=body(wait=True)).json()["status"] == "completed"
    assert pauses == [pause_s] * 3


def test_an_outage_of_redis_does_not_count_as_time_without_a_batch(
    client: TestClient, jobs: JobStore, waiting_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile no worker can store a batch, and it does so only after Redis is back."""

    def failing(store: JobStore, job_id: str) -> JobRecord | None:
        look = next(looks)
        if look == 1:
            monkeypatch.setattr(waiting_time, "_now", 0.6)  # of the 0.5 s that a batch may take
            raise ConnectionError("no primary")
        if look == 3:
            compute(jobs, job_id, 0)
        return read(store, job_id)

    looks, read = itertools.count(), JobStore.read
    monkeypatch.setattr(JobStore, "read", failing)
    assert client.post(GENERATE, json=body(wait=True)).json().get("status") == "completed"


def test_a_job_under_way_can_be_cancelled(client: TestClient, jobs: JobStore) -> None:
    job_id = submit(client, batch_size=1)
    compute(jobs, job_id, 0)
    assert client.delete(f"{GENERATE}/{job_id}").json() == {"status": "OK", "cancelled": True}
    assert client.get(f"{GENERATE}/{job_id}").json()["status"] == "cancelled"
    assert client.delete(f"{GENERATE}/{job_id}").json() == {"status": "OK", "cancelled": False}
    assert client.delete(f"{GENERATE}/{'0' * 32}").status_code == 404


@pytest.mark.parametrize("what", ["the job", "the status"])
def test_a_poll_uses_a_thread_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = f"{GENERATE}/{submit(client)}" if what == "the job" else "/api/v1/pow/status"
    run_sync, calls = to_thread.run_sync, []

    async def counted(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls.append(call)
        return await run_sync(call, *args, **options)

    monkeypatch.setattr(to_thread, "run_sync", counted)
    assert client.get(path).status_code == 200
    assert len(calls) == 1  # which reads Redis
