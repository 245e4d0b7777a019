"""Answers of jobs: built part by part, large ones kept in pieces, and never without an end."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis
from redis.exceptions import ConnectionError

from poc_core.records import JobStatus, NewJob
from poc_core.state import jobs as jobs_module
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox
from tests.harness.samples import (
    MODEL,
    REQUEST,
    SPEC,
    complete_batch,
    known,
    lease_batch,
    leased,
    new_job,
    result_body,
)
from tests.harness.stored import outbox_status
from workers.work import finish_or_fail

PIECE = 100
URL = "http://receiver:9000/poc"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]) -> None:
    monkeypatch.setattr("poc_core.state.jobs.PIECE_BYTES", PIECE)
    serve("w1")


def done(
    jobs: JobStore, nonces: list[int], url: str | None = None, values: list[Any] | None = None
) -> str:
    """A job whose batches are all done and that waits to be finished."""
    request = REQUEST.model_copy(update={"url": url})
    job_id = jobs.create(NewJob(MODEL, SPEC, request, nonces, batch_size=2))
    given = [f"v{nonce}" for nonce in nonces] if values is None else values
    for index in range((len(nonces) + 1) // 2):
        leased(lease_batch(jobs, job_id, index, "w1"))
        complete_batch(jobs, job_id, index, given[2 * index : 2 * index + 2])
    return job_id


def status(jobs: JobStore, job_id: str) -> tuple[JobStatus, str | None]:
    record = known(jobs.read(job_id))
    return record.status, record.error


def expected(job_id: str, nonces: list[int]) -> dict[str, Any]:
    return {
        "status": "completed",
        "request_id": job_id,
        "artifacts": [{"nonce": nonce, "vector_b64": f"v{nonce}"} for nonce in nonces],
        "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
    }


def test_a_large_answer_is_kept_in_pieces(jobs: JobStore, redis: Redis) -> None:
    nonces = list(range(41))
    job_id = done(jobs, nonces)
    assert jobs.finish(job_id)
    pieces: Any = redis.lrange(f"poc:job:{job_id}:result", 0, -1)
    assert [len(piece) for piece in pieces[:-1]] == [PIECE] * (len(pieces) - 1)
    assert len(pieces) > 10
    assert not redis.hexists(f"poc:job:{job_id}", "result")
    assert json.loads(result_body(jobs, job_id) or b"") == expected(job_id, nonces)
    assert sorted(redis.scan_iter("poc:job:*")) == [
        f"poc:job:{job_id}".encode(),
        f"poc:job:{job_id}:result".encode(),
    ]
    assert all(int(redis.ttl(key)) > 0 for key in redis.scan_iter("*"))


def test_the_api_sends_a_large_answer_piece_by_piece(jobs: JobStore, client: TestClient) -> None:
    nonces = list(range(41))
    job_id = done(jobs, nonces)
    jobs.finish(job_id)
    with client.stream("GET", f"/api/v1/pow/generate/{job_id}") as answer:
        body = answer.read()
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert int(answer.headers["content-length"]) == len(body)
    assert json.loads(body) == expected(job_id, nonces)


def test_excluded_nonces_leave_no_trace_between_pieces(jobs: JobStore) -> None:
    nonces = list(range(40))
    left = [n for n in nonces if not (n < 4 or n % 5 == 0 or n > 37)]
    job_id = done(jobs, nonces, values=[f"v{n}" if n in left else None for n in nonces])
    jobs.finish(job_id)
    answer = json.loads(result_body(jobs, job_id) or b"")
    assert answer == expected(job_id, left) | {"excluded_nonces": sorted(set(nonces) - set(left))}


def test_an_answer_of_excluded_nonces_only(jobs: JobStore) -> None:
    job_id = done(jobs, [1, 2, 3], values=[None] * 3)
    jobs.finish(job_id)
    answer = json.loads(result_body(jobs, job_id) or b"")
    assert answer == expected(job_id, []) | {"excluded_nonces": [1, 2, 3]}


@pytest.mark.parametrize("n", [1, 40])
def test_the_callback_of_an_answer_is_whole_and_one_payload(
    jobs: JobStore, outbox: Outbox, redis: Redis, n: int
) -> None:
    nonces = list(range(n))
    job_id = done(jobs, nonces, URL)
    jobs.finish(job_id)
    assert outbox_status(redis, job_id).waiting == 1
    delivery = known(outbox.take(job_id))
    about = {"block_hash": "block", "block_height": 7, "public_key": "key", "node_id": 0}
    answer = expected(job_id, nonces)
    del answer["status"]
    assert json.loads(delivery.body) == about | answer | {"payload_id": f"{job_id}-0"}
    assert outbox.delivered(delivery)
    status = outbox_status(redis, job_id)
    assert (status.waiting, status.delivered, outbox.n_jobs()) == (0, 1, 0)
    assert redis.llen(f"poc:outbox:{job_id}:entries") == 0


def test_a_job_that_is_cancelled_while_its_values_are_read_stays_cancelled(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = done(jobs, list(range(41)))
    read = jobs.read

    def read_late(job_id: str) -> Any:
        record = read(job_id)
        jobs.cancel(job_id)
        return record

    monkeypatch.setattr(jobs, "read", read_late)
    assert not jobs.finish(job_id)
    assert status(jobs, job_id) == (JobStatus.CANCELLED, None)


def test_one_caller_at_a_time_builds_an_answer(jobs: JobStore, redis: Redis) -> None:
    job_id = done(jobs, [1, 2])
    redis.set(f"poc:job:{job_id}:finishing", "another", ex=10)
    assert not jobs.finish(job_id)
    assert status(jobs, job_id) == (JobStatus.RUNNING, None)
    redis.delete(f"poc:job:{job_id}:finishing")  # it died
    assert jobs.finish(job_id)
    assert not redis.exists(f"poc:job:{job_id}:finishing")


def test_the_lock_of_a_finish_is_short_whatever_else_touches_the_job(
    jobs: JobStore, redis: Redis
) -> None:
    job_id = done(jobs, [1, 2])
    redis.set(f"poc:job:{job_id}:finishing", "another", ex=10)
    assert jobs.note_waiting([job_id], "")
    assert 0 < int(redis.ttl(f"poc:job:{job_id}:finishing")) <= 10


def test_a_job_that_kills_whoever_finishes_it_fails(
    jobs: JobStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> Any:
        raise ConnectionError("Redis closed the connection")

    job_id = done(jobs, [1, 2])
    monkeypatch.setattr("poc_core.state.jobs.answer_texts", dies)
    for _ in range(jobs_module.MAX_FINISHES):
        with pytest.raises(ConnectionError):  # not for ever, as far as anybody can know
            finish_or_fail(jobs, job_id)
        assert status(jobs, job_id) == (JobStatus.RUNNING, None)
        redis.delete(f"poc:job:{job_id}:finishing")  # by its age
    finish_or_fail(jobs, job_id)
    ended, error = status(jobs, job_id)
    assert ended is JobStatus.FAILED
    assert "5 workers died or lost Redis over it" in str(error)


def test_a_job_whose_last_values_redis_lost_while_its_answer_is_built_goes_on(
    jobs: JobStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a failover: the new primary knows the job, but not that its last batch is done."""
    job_id, read = done(jobs, [1, 2, 3]), jobs.read

    def fail_over(job_id: str) -> Any:
        monkeypatch.setattr(jobs, "read", read)
        redis.delete(f"poc:job:{job_id}:finishing")
        redis.hdel(f"poc:job:{job_id}:values", "1")
        redis.sadd(f"poc:job:{job_id}:todo", "1")
        return read(job_id)

    monkeypatch.setattr(jobs, "read", fail_over)
    finish_or_fail(jobs, job_id)
    assert status(jobs, job_id) == (JobStatus.RUNNING, None)
    complete_batch(jobs, job_id, 1, ["v3"])
    assert jobs.finish(job_id)
    assert json.loads(result_body(jobs, job_id) or b"") == expected(job_id, [1, 2, 3])


@pytest.mark.parametrize("what", ["values", "record"])
def test_a_job_whose_answer_cannot_be_built_fails_and_says_why(
    jobs: JobStore, redis: Redis, what: str
) -> None:
    job_id = done(jobs, [1, 2])
    spec = redis.hget(f"poc:job:{job_id}", "spec")
    if what == "values":
        redis.hdel(f"poc:job:{job_id}:values", "0")
    else:
        redis.hset(f"poc:job:{job_id}", "spec", "{")
    finish_or_fail(jobs, job_id)
    redis.hset(f"poc:job:{job_id}", "spec", spec)
    ended, error = status(jobs, job_id)
    assert ended is JobStatus.FAILED
    assert what == "record" or "values of its batches are missing" in str(error)


def test_what_was_written_of_an_answer_that_is_not_wanted_any_more_expires(
    jobs: JobStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = done(jobs, list(range(41)), URL)

    def ends(*_: Any) -> Iterator[bytes]:
        yield b'{"status": "completed", "artifacts": [' + b" " * 3 * PIECE
        jobs.cancel(job_id)
        yield b"]}"

    monkeypatch.setattr("poc_core.state.jobs.answer_texts", ends)
    assert not jobs.finish(job_id)
    assert status(jobs, job_id)[0] is JobStatus.CANCELLED
    assert all(int(redis.ttl(key)) > 0 for key in redis.scan_iter("*"))


def test_an_answer_that_expires_while_it_is_sent_breaks_off(jobs: JobStore, redis: Redis) -> None:
    job_id = done(jobs, list(range(41)))
    jobs.finish(job_id)
    answer = known(jobs.result(job_id))
    next(answer.pieces)
    redis.delete(f"poc:job:{job_id}:result")
    with pytest.raises(OSError, match="expired while it was sent"):
        next(answer.pieces)


def test_a_large_verdict_is_kept_in_pieces_too(jobs: JobStore) -> None:
    nonces = list(range(40))
    claimed = dict.fromkeys(nonces, "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")
    job_id = jobs.create(new_job(nonces, batch_size=40, claimed=claimed))
    lease_batch(jobs, job_id, 0, "w1")
    complete_batch(jobs, job_id, 0, ["ADwAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"] * 40)
    assert jobs.finish(job_id)
    answer = known(jobs.result(job_id))
    assert answer.is_in_pieces
    assert json.loads(b"".join(answer.pieces))["mismatch_nonces"] == nonces
