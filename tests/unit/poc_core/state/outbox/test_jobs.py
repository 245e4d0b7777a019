"""Callbacks of jobs: their bodies, their number and their shares."""

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from poc_core.errors import QueueFullError
from poc_core.records import Lease, NewJob
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import LAST_BACKOFF_S, Receivers
from poc_core.state.parsing import BREAKS_AT
from tests.harness.outbox import URL, VECTOR, Box, content
from tests.harness.samples import K_DIM, MODEL, REQUEST, SPEC, complete_batch, due_now, lease_batch

pytestmark = pytest.mark.usefixtures("a_worker")


def test_a_finished_job_is_due_at_once(box: Box) -> None:
    job_id = box.finish()
    assert due_now(box.outbox) == [job_id]


def test_a_job_without_a_url_has_no_callback(box: Box) -> None:
    box.finish(url=None)
    assert (due_now(box.outbox), box.outbox.n_jobs()) == ([], 0)


def test_a_jobs_artifacts_are_sent_as_the_protocol_says(box: Box) -> None:
    job_id = box.finish()
    delivery = box.take(job_id)
    assert delivery.url == f"{URL}/generated"
    assert content(delivery) == {
        "request_id": job_id,
        "public_key": "key",
        "block_hash": "block",
        "block_height": 7,
        "node_id": 0,
        "artifacts": [{"nonce": 5, "vector_b64": VECTOR}, {"nonce": 6, "vector_b64": VECTOR}],
        "encoding": {"dtype": "f16", "k_dim": K_DIM, "endian": "le"},
        "payload_id": f"{job_id}-0",
    }


def test_a_jobs_verdict_is_sent_as_the_protocol_says(box: Box) -> None:
    job_id = box.finish(claimed={5: VECTOR, 6: VECTOR})
    delivery = box.take(job_id)
    assert delivery.url == f"{URL}/validated"
    assert content(delivery) == {
        "request_id": job_id,
        "block_hash": "block",
        "block_height": 7,
        "public_key": "key",
        "node_id": 0,
        "n_total": 2,
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "fraud_detected": False,
        "fraud_threshold": 0.01,
        "n_excluded": 0,
        "dist_threshold": 0.02,
        "p_mismatch": 0.001,
        "terms": "the request",
        "distances": {"min": 0.0, "median": 0.0, "max": 0.0, "histogram": [[0.0001, 2]]},
        "likely_cause": None,
        "payload_id": f"{job_id}-0",
    }


def test_a_job_finished_twice_has_one_callback(box: Box) -> None:
    job_id = box.finish()
    assert not box.jobs.finish(job_id)
    assert box.redis.llen(f"poc:outbox:{job_id}:entries") == 1


def test_jobs_count_until_their_callback_is_delivered(box: Box) -> None:
    first, second = box.finish(), box.finish()
    assert box.outbox.n_jobs() == 2
    box.outbox.failed(box.take(first), "500")
    box.outbox.delivered(box.take(second))
    assert box.outbox.n_jobs() == 1


# Places of jobs.


def test_jobs_that_come_quickly_do_not_pass_one_for_each_half_mebibyte_of_the_outbox(
    box: Box,
) -> None:
    box = box.with_settings(outbox_max_bytes=70 * 512 * 1024, max_queued_nonces=10**6)
    jobs, outbox = box.jobs, box.outbox
    refusals = []
    for number in range(100):  # none of them is computed before all are asked for
        try:
            queued_of(jobs, f"client {number}", f"receiver:{number}")
        except QueueFullError as error:
            refusals.append(str(error))
    assert (outbox.n_jobs(), len(refusals)) == (70, 30)
    assert "The callbacks of 70 jobs" in refusals[0]
    assert "try again later, or leave out the url and poll" in refusals[0]
    assert len(jobs.active_jobs(MODEL)) == 70
    jobs.create(NewJob(MODEL, SPEC, REQUEST, [1], 1))  # without a url


@pytest.mark.parametrize("end", ["fail", "cancel"])
def test_a_job_that_ends_without_a_callback_gives_its_place_back(box: Box, end: str) -> None:
    job_id = box.jobs.create(NewJob(MODEL, SPEC, REQUEST.model_copy(update={"url": URL}), [5], 1))
    assert box.outbox.n_jobs() == 1
    if end == "fail":
        box.jobs.fail(job_id, "no engine")
    else:
        box.jobs.cancel(job_id)
    assert (box.outbox.n_jobs(), due_now(box.outbox)) == (0, [])


def test_the_place_of_a_job_that_expired_is_found_again(box: Box) -> None:
    gone = box.jobs.create(NewJob(MODEL, SPEC, REQUEST.model_copy(update={"url": URL}), [5], 1))
    waits = box.finish()
    box.redis.delete(f"poc:job:{gone}")
    box.jobs.recount()
    assert box.redis.hkeys("poc:outbox:of_jobs") == [waits.encode()]


def test_jobs_callbacks_are_bounded_by_their_bytes_together(box: Box) -> None:
    box = box.with_settings(outbox_max_bytes=1024)
    first = box.finish(nonces=list(range(30)))
    with pytest.raises(QueueFullError, match="1024 bytes of them"):
        box.finish()
    box.jobs.recount()  # changes nothing
    with pytest.raises(QueueFullError):
        box.finish()
    box.outbox.delivered(box.take(first))
    box.finish()


# Shares of the jobs' callbacks.


def queued_of(jobs: JobStore, client: str, receiver: str) -> str:
    """A job with a callback that nobody has computed."""
    request = REQUEST.model_copy(update={"url": f"http://{receiver}/poc"})
    return jobs.create(NewJob(MODEL, SPEC, request, [5], 1, client=client))


def job_of(jobs: JobStore, client: str, receiver: str) -> str:
    """A job whose callback waits for its receiver."""
    job_id = queued_of(jobs, client, receiver)
    assert isinstance(lease_batch(jobs, job_id, 0, "w1"), Lease)
    complete_batch(jobs, job_id, 0, [VECTOR])
    assert jobs.finish(job_id)
    return job_id


def waiting_of(redis: Redis) -> set[str]:
    found: Any = redis.hkeys("poc:outbox:of_jobs")
    return {job_id.decode() for job_id in found}


def is_not_taken(box: Box, job_id: str, tries: int = 1) -> None:
    for _ in range(tries):
        box.outbox.failed(box.take(job_id), "refused")
        box.clock.now += LAST_BACKOFF_S


@pytest.fixture
def few(box: Box) -> Box:
    """64 callbacks, the fewest there may be."""
    return box.with_settings(outbox_max_bytes=64 * 512 * 1024)


@pytest.mark.promise("a client with dead receivers", "does not block other callbacks")
@pytest.mark.parametrize("make", [queued_of, job_of], ids=["queued", "computed"])
def test_one_client_and_one_receiver_have_a_quarter_of_the_callbacks(
    few: Box, make: Callable[[JobStore, str, str], str]
) -> None:
    first = {make(few.jobs, "greedy", f"dead:{number}") for number in range(16)}
    with pytest.raises(QueueFullError, match=r"a quarter of 64 jobs .* one client"):
        make(few.jobs, "greedy", "alive:1")
    second = {make(few.jobs, f"client {number}", "silent:1") for number in range(16)}
    with pytest.raises(QueueFullError, match=r"a quarter of 64 jobs .* one receiver"):
        make(few.jobs, "another", "silent:1")
    rest = {make(few.jobs, f"other {number}", f"alive:{number}") for number in range(32)}
    with pytest.raises(QueueFullError, match="callbacks of 64 jobs"):
        make(few.jobs, "last", "last:1")
    assert waiting_of(few.redis) == first | second | rest  # nobody lost one
    one = next(iter(first))
    if make is job_of:
        few.outbox.delivered(few.take(one))
    else:
        few.jobs.cancel(one)
    make(few.jobs, "greedy", "alive:1")


@pytest.mark.promise("a client with dead receivers", "does not block other callbacks")
def test_one_client_and_one_receiver_have_a_quarter_of_the_bytes(
    few: Box,
) -> None:
    job_of(few.jobs, "greedy", "dead:1")
    size = int(few.redis.get("poc:outbox:job_bytes") or 0)
    tight = few.with_settings(outbox_max_bytes=4 * size).jobs
    with pytest.raises(QueueFullError, match="one client"):
        job_of(tight, "greedy", "alive:1")
    with pytest.raises(QueueFullError, match="one receiver"):
        job_of(tight, "other", "dead:1")
    job_of(tight, "other", "alive:1")


def test_callbacks_that_nobody_takes_are_given_up_when_the_node_is_stopped(
    few: Box,
) -> None:
    hopeless = job_of(few.jobs, "one", "dead:1")
    is_not_taken(few, hopeless, BREAKS_AT)
    silent = job_of(few.jobs, "one", "silent:1")
    for _ in range(BREAKS_AT):
        Receivers(few.redis, few.clock).silent("silent:1")
    failed_once = job_of(few.jobs, "one", "restarts:1")
    is_not_taken(few, failed_once)
    fresh = job_of(few.jobs, "one", "alive:1")
    assert few.outbox.drop_failing() == 2
    assert waiting_of(few.redis) == {failed_once, fresh}
    assert few.outbox.take(silent) is None
    assert int(few.redis.get("poc:outbox:job_bytes") or 0) == sum(
        few.outbox.status(job_id).waiting_bytes for job_id in (failed_once, fresh)
    )
