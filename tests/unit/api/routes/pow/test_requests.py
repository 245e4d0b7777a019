"""A request for a job is stored and published, or refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.routes.services import Services
from poc_core.fields import MAX_NONCE
from poc_core.records import JobKind, NewJob
from poc_core.schemes.decode.limits import ChainLimits
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.pow_routes import GENERATE, VECTOR, compute, record_of, submit
from tests.harness.samples import K_DIM, MODEL, RecordingDispatcher, body

pytestmark = pytest.mark.usefixtures("a_worker")


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


def test_a_refused_model_is_answered_with_the_deployed_ones(
    client: TestClient, serve: Callable[..., Any]
) -> None:
    asked = body(params={"model": "another", "seq_len": 32})
    assert client.post(GENERATE, json=asked).json()["detail"]["deployed"] == {"model": MODEL}
    serve("w2", model="second")
    found = client.post(GENERATE, json=asked).json()["detail"]["deployed"]["model"]
    assert sorted(found) == sorted([MODEL, "second"])


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


@pytest.mark.parametrize("lost", [":nonces", ":claimed"])
def test_redis_that_loses_what_was_uploaded_is_503_and_queues_nothing(
    client: TestClient, jobs: JobStore, redis: Redis, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """A failover loses what was written last; uploads are the most that one request writes."""

    def failing_over(store: JobStore, key: str, job: NewJob) -> None:
        upload(store, key, job)
        assert redis.delete(key + lost)

    upload = vars(JobStore)["_stage"]
    monkeypatch.setattr(JobStore, "_stage", failing_over)
    claims = {"artifacts": [{"nonce": nonce, "vector_b64": VECTOR} for nonce in (1, 2)]}
    answer = client.post(GENERATE, json=body(nonces=[1, 2], validation=claims))
    assert (answer.status_code, answer.headers.get("Retry-After")) == (503, "5")
    assert jobs.active_jobs(MODEL) == []
