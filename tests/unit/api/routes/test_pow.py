"""POST /generate and what becomes of it, as a client sees it."""

import base64
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from anyio import to_thread
from fastapi.testclient import TestClient
from redis import Connection, Redis

from api.routes.services import Services
from poc_core.arithmetic.nonces import MAX_NONCE
from poc_core.records import JobKind, JobRecord
from poc_core.schemes.decode.limits import ChainLimits
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import (
    K_DIM,
    MODEL,
    RecordingDispatcher,
    body,
    complete_batch,
    known,
    lease_batch,
    leased,
    round_body,
)
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.usefixtures("a_worker")

GENERATE = "/api/v1/pow/generate"
VECTOR = base64.b64encode(bytes(2 * K_DIM)).decode()


def submit(client: TestClient, **changes: Any) -> str:
    answer = client.post(GENERATE, json=body(**changes))
    assert answer.status_code == 200, answer.text
    job_id: str = answer.json()["request_id"]
    return job_id


def record_of(jobs: JobStore, job_id: str) -> JobRecord:
    return known(jobs.read(job_id))


def compute(jobs: JobStore, job_id: str, index: int) -> None:
    lease = leased(lease_batch(jobs, job_id, index, "w1"))
    if complete_batch(jobs, job_id, index, [VECTOR for _ in lease.nonces]):
        jobs.finish(job_id)


class Worker(threading.Thread):
    """Does to the first job that appears what `step` says, beside a client that waits."""

    def __init__(self, jobs: JobStore, step: Callable[[str], object]) -> None:
        super().__init__(daemon=True)
        self.jobs, self.step = jobs, step

    def run(self) -> None:
        wait_until(lambda: self.jobs.active_jobs(MODEL), "a job")
        self.step(self.jobs.active_jobs(MODEL)[0])


def test_413_for_an_answer_that_would_be_too_large_says_how_many_nonces_fit(
    client: TestClient, jobs: JobStore, redis: Redis, settings: Settings, serve: Callable[..., Any]
) -> None:
    small = settings.model_copy(update={"max_result_bytes": 1024 * 1024})
    state = client.app.state  # type: ignore[attr-defined]
    state.services = Services(small, redis, state.services.dispatcher)
    serve("w1", hidden_size=4096)
    answer = client.post(GENERATE, json=body(nonces=list(range(100)), params={"k_dim": 4096}))
    assert answer.status_code == 413
    assert "send at most 95 nonces in one request" in answer.json()["detail"]
    assert jobs.active_jobs(MODEL) == []
    fits = body(nonces=list(range(95)), params={"k_dim": 4096})
    assert client.post(GENERATE, json=fits).status_code == 200


def test_429_for_more_jobs_than_may_wait(
    client: TestClient, redis: Redis, settings: Settings
) -> None:
    state = client.app.state  # type: ignore[attr-defined]
    few = settings.model_copy(update={"max_queued_nonces": 6})
    state.services = Services(few, redis, state.services.dispatcher)
    submit(client)
    answer = client.post(GENERATE, json=body())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    assert "1 jobs have not ended" in answer.json()["detail"]


def test_a_request_is_queued_stored_and_published(
    client: TestClient, jobs: JobStore, dispatcher: RecordingDispatcher
) -> None:
    answer = client.post(
        GENERATE, json=body(nonces=[3, 1, 2], batch_size=2, url="http://receiver:9000/poc")
    )
    job_id = answer.json()["request_id"]
    assert answer.json() == {"status": "queued", "request_id": job_id, "queued_count": 3}
    record = record_of(jobs, job_id)
    assert (record.kind, record.n_total, record.n_batches) == (JobKind.GENERATE, 3, 2)
    assert record.spec.options == {"k_dim": K_DIM, "stronger_rng": False}
    assert (record.request.block_height, record.request.url) == (7, "http://receiver:9000/poc")
    assert dispatcher.woken == [(MODEL, 1)]  # there is one worker


def test_no_more_workers_are_woken_than_a_job_has_batches(
    client: TestClient, dispatcher: RecordingDispatcher, serve: Callable[..., Any]
) -> None:
    for number in range(5):
        serve(f"w{number}")
    for nonces in ([1], [1, 2, 3], list(range(40))):
        client.post(GENERATE, json=body(nonces=nonces, batch_size=2))
    assert dispatcher.woken == [(MODEL, 1), (MODEL, 2), (MODEL, 5)]


def test_the_largest_nonces_keep_their_last_digit(client: TestClient, jobs: JobStore) -> None:
    job_id = submit(client, nonces=[MAX_NONCE, MAX_NONCE - 1])
    compute(jobs, job_id, 0)
    answer = client.get(f"{GENERATE}/{job_id}").json()
    assert [artifact["nonce"] for artifact in answer["artifacts"]] == [MAX_NONCE, MAX_NONCE - 1]


def test_unknown_fields_outside_params_are_ignored(client: TestClient) -> None:
    submit(client, group_id=0, n_groups=1, something={"new": [1]})


def test_an_empty_url_means_no_callback(client: TestClient, jobs: JobStore) -> None:
    assert record_of(jobs, submit(client, url="")).request.url is None


def test_the_stronger_rng_is_part_of_the_spec(client: TestClient, jobs: JobStore) -> None:
    record = record_of(jobs, submit(client, poc_stronger_rng=True))
    assert record.spec.options["stronger_rng"] is True


@pytest.mark.parametrize(
    ("asked", "max_batch_tokens", "n_batches"),
    [(None, 8192, 4), (50, 8192, 2), (50, 640, 10), (50, 64, 100)],
    ids=["the default of 32", "as asked", "no more than the engine holds", "at least one nonce"],
)
def test_the_batch_size_is(
    client: TestClient,
    jobs: JobStore,
    serve: Callable[..., Any],
    asked: int,
    max_batch_tokens: int,
    n_batches: int,
) -> None:
    serve("w1", max_batch_tokens=max_batch_tokens)
    job_id = submit(client, nonces=list(range(100)), batch_size=asked)
    assert record_of(jobs, job_id).n_batches == n_batches


def test_the_smallest_worker_of_a_model_sets_its_limits(
    client: TestClient, jobs: JobStore, serve: Callable[..., Any]
) -> None:
    serve("w2", max_batch_tokens=640, max_seq_len=32)
    assert client.post(GENERATE, json=body()).json()["detail"]["deployed"] == {"seq_len": 32}


def test_workers_with_different_codebooks_compute_no_decode_proofs(
    client: TestClient, serve: Callable[..., Any], workers: WorkerRegistry
) -> None:
    for worker_id, codebook in (("w1", "aa"), ("w2", "bb")):
        record = serve(worker_id, hidden_size=256)
        workers.heartbeat(replace(record, info=ChainLimits(codebook=codebook).on(record.info)))
    asked = body(params={"model": MODEL, "seq_len": 32, "scheme": "decode", "max_tokens": 4})
    refused = client.post(GENERATE, json=asked)
    assert refused.status_code == 422
    assert "POC_DECODE_CODEBOOK must be the same" in refused.text
    workers.heartbeat(replace(record, info=ChainLimits(codebook="aa").on(record.info)))
    assert client.post(GENERATE, json=asked).status_code == 200


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


def test_stop_cancels_what_is_queued(client: TestClient, jobs: JobStore) -> None:
    job_id = submit(client)
    answer = client.post("/api/v1/pow/stop")
    assert answer.json() == {
        "status": "OK",
        "pow_status": {"status": "STOPPED"},
        "cancelled_jobs": 1,
    }
    assert client.get(f"{GENERATE}/{job_id}").json()["status"] == "cancelled"
    assert client.post("/api/v1/pow/stop").json()["cancelled_jobs"] == 0


def test_stop_gives_up_callbacks_that_nobody_takes(
    client: TestClient, jobs: JobStore, redis: Redis
) -> None:
    job_id = submit(client, url="http://receiver:9000/dead", nonces=[1])
    compute(jobs, job_id, 0)
    assert redis.hget("poc:outbox:of_jobs", job_id) is not None
    redis.hset("poc:receiver:receiver:9000", "failures", 4)
    client.post("/api/v1/pow/stop")
    assert redis.hlen("poc:outbox:of_jobs") == 1
    redis.hset("poc:receiver:receiver:9000", "failures", 5)
    client.post("/api/v1/pow/stop")
    assert redis.hlen("poc:outbox:of_jobs") == 0
    assert client.get(f"/api/v1/pow/generate/{job_id}").json()["status"] == "completed"


def test_a_callback_takes_a_place_of_who_asked_for_it(client: TestClient, redis: Redis) -> None:
    job_id = submit(client, url="http://receiver:9000/x")
    place: Any = redis.hget("poc:outbox:of_jobs", job_id)
    _, receiver, client_name = place.decode().split(" ")
    assert (receiver, client_name) == ("receiver:9000", "testclient")


def test_stop_leaves_what_is_under_way_and_what_is_waited_for(
    client: TestClient, jobs: JobStore
) -> None:
    running = submit(client, batch_size=1)
    compute(jobs, running, 0)

    def stop_then_compute(job_id: str) -> None:
        assert client.post("/api/v1/pow/stop").json()["cancelled_jobs"] == 0
        compute(jobs, job_id, 0)

    waiting = threading.Thread(
        target=lambda: answers.append(client.post(GENERATE, json=body(wait=True))), daemon=True
    )
    answers: list[Any] = []
    waiting.start()
    wait_until(lambda: len(jobs.active_jobs(MODEL)) == 2, "both jobs")
    found = jobs.active_jobs(MODEL)
    stop_then_compute(next(job_id for job_id in found if job_id != running))
    waiting.join(60)
    assert answers[0].json()["status"] == "completed"
    assert client.get(f"{GENERATE}/{running}").json()["status"] == "running"


def test_a_job_under_way_can_be_cancelled(client: TestClient, jobs: JobStore) -> None:
    job_id = submit(client, batch_size=1)
    compute(jobs, job_id, 0)
    assert client.delete(f"{GENERATE}/{job_id}").json() == {"status": "OK", "cancelled": True}
    assert client.get(f"{GENERATE}/{job_id}").json()["status"] == "cancelled"
    assert client.delete(f"{GENERATE}/{job_id}").json() == {"status": "OK", "cancelled": False}
    assert client.delete(f"{GENERATE}/{'0' * 32}").status_code == 404


def test_status_shows_throughput_queue_and_workers(
    client: TestClient, jobs: JobStore, clock: Any
) -> None:
    job_id = submit(client, nonces=list(range(30)), batch_size=20)
    compute(jobs, job_id, 0)
    clock.now += 1
    answer = client.get("/api/v1/pow/status").json()
    assert (answer["status"], answer["state"], answer["config"]) == ("IDLE", "IDLE", None)
    assert (answer["stats"]["total_processed"], answer["stats"]["nonces_per_second"]) == (20, 2.0)
    assert (answer["queued_nonces"], answer["callbacks_waiting"]) == (10, 0)
    (worker,) = answer["workers"]
    assert (worker["id"], worker["model"], worker["state"]) == ("w1", MODEL, "ready")
    assert worker["info"]["max_batch_tokens"] == 8192


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


@pytest.mark.parametrize("state", ["no round", "a round"])
def test_the_status_asks_redis_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    if state == "a round":
        assert client.post("/api/v1/pow/init/generate", json=round_body()).status_code == 200
    assert client.get("/api/v1/pow/status").status_code == 200  # Redis has the script now
    send, sent = Connection.send_packed_command, []

    def counted(connection: Connection, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name not in ("redis-watch", "reporting", "downloads"):
            sent.append(args)
        return send(connection, *args, **options)

    # The API's own threads ask by themselves, one of them every second.
    monkeypatch.setattr(Connection, "send_packed_command", counted)  # each waits for its answer
    assert client.get("/api/v1/pow/status").json()["workers"] != []
    assert len(sent) == 1
