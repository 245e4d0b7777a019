"""The answer of a completed validation."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from poc_core.records import JobStatus, NewJob
from poc_core.schemes.artifact.encoding import encode_vectors
from poc_core.schemes.artifact.requests import ReceivedStatTest
from poc_core.schemes.artifact.terms import ArtifactTerms, StatTest
from poc_core.state.jobs import JobStore
from tests.harness.samples import (
    K_DIM,
    MODEL,
    REQUEST,
    SPEC,
    complete_batch,
    lease_batch,
    result_body,
)

pytestmark = pytest.mark.usefixtures("a_worker")

VECTORS = encode_vectors(np.eye(K_DIM, dtype=np.float32))


def computed_validation(
    jobs: JobStore, claimed: list[str], computed: Sequence[str | None], **test: float
) -> str:
    """A job that waits to be finished."""
    request = REQUEST.model_copy(update={"terms": StatTest(**test).model_dump()})
    nonces = list(range(len(claimed)))
    job_id = jobs.create(
        NewJob(MODEL, SPEC, request, nonces, len(nonces), dict(zip(nonces, claimed, strict=True)))
    )
    lease_batch(jobs, job_id, 0, "w1")
    complete_batch(jobs, job_id, 0, computed)
    return job_id


def validate(
    jobs: JobStore, claimed: list[str], computed: Sequence[str | None], **test: float
) -> dict[str, Any]:
    job_id = computed_validation(jobs, claimed, computed, **test)
    assert jobs.finish(job_id)
    answer: dict[str, Any] = json.loads(result_body(jobs, job_id) or b"")
    assert answer.pop("request_id") == job_id
    return answer


def test_equal_artifacts_are_no_fraud(jobs: JobStore) -> None:
    assert validate(jobs, VECTORS, list(VECTORS)) == {
        "status": "completed",
        "n_total": K_DIM,
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "fraud_detected": False,
        "fraud_threshold": 0.01,
        "n_excluded": 0,
        "dist_threshold": 0.02,
        "p_mismatch": 0.001,
        "terms": "the request",
        "distances": {"min": 0.0, "median": 0.0, "max": 0.0, "histogram": [[0.0001, 12]]},
        "likely_cause": None,
    }


def test_other_artifacts_are_mismatches_and_fraud(jobs: JobStore) -> None:
    answer = validate(jobs, VECTORS[1:] + VECTORS[:1], list(VECTORS))
    assert answer["mismatch_nonces"] == list(range(K_DIM))
    assert answer["fraud_detected"] is True


def test_nonces_that_this_node_could_not_compute_are_no_mismatches(jobs: JobStore) -> None:
    answer = validate(jobs, VECTORS, [None, *VECTORS[1:]])
    assert (answer["n_excluded"], answer["n_mismatch"]) == (1, 0)


def test_the_requests_stat_test_decides(jobs: JobStore) -> None:
    one_wrong = [VECTORS[1], *VECTORS[1:]]
    assert validate(jobs, one_wrong, list(VECTORS), p_mismatch=0.5)["fraud_detected"] is False
    assert validate(jobs, one_wrong, list(VECTORS), p_mismatch=1e-6)["fraud_detected"] is True
    assert validate(jobs, one_wrong, list(VECTORS), dist_threshold=2)["n_mismatch"] == 0


@pytest.mark.parametrize(
    ("n_total", "n_excluded", "judged"),
    [(1, 1, False), (2, 1, True), (12, 1, True), (12, 2, False), (1, 0, True)],
)
def test_a_tenth_of_the_nonces_and_one_of_several_may_stay_uncomputed(
    jobs: JobStore, n_total: int, n_excluded: int, judged: bool
) -> None:
    computed: list[str | None] = [None] * n_excluded + VECTORS[n_excluded:n_total]
    job_id = computed_validation(jobs, VECTORS[:n_total], computed)
    assert jobs.finish(job_id) is judged
    record = jobs.read(job_id)
    assert record is not None
    assert (record.status is JobStatus.COMPLETED, record.unavailable) == (judged, not judged)
    if not judged:
        assert record.error is not None
        assert f"could not compute {n_excluded} of {n_total} nonces" in record.error


def test_twenty_of_two_hundred_may_stay_uncomputed_and_one_more_not(jobs: JobStore) -> None:
    claimed = VECTORS[:1] * 200
    assert jobs.finish(computed_validation(jobs, claimed, [*[None] * 20, *claimed[20:]]))
    assert not jobs.finish(computed_validation(jobs, claimed, [*[None] * 21, *claimed[21:]]))


BOTH = {"p_value_threshold": 0.5, "fraud_threshold": 0.2}


@pytest.mark.parametrize(
    ("sent", "ignored", "honoured"),
    [
        ({}, 0.01, 0.01),
        ({"p_value_threshold": 0.5}, 0.01, 0.5),
        ({"fraud_threshold": 0.2}, 0.2, 0.2),
        (BOTH, 0.2, 0.2),
    ],
    ids=["neither", "p_value_threshold", "fraud_threshold", "both"],
)
def test_p_value_threshold_is_ignored_unless_honoured(
    sent: dict[str, float], ignored: float, honoured: float
) -> None:
    test = ReceivedStatTest.model_validate_json(json.dumps(sent))
    assert test.applied(honour_p_value_threshold=False) == ArtifactTerms(fraud_threshold=ignored)
    assert test.applied(honour_p_value_threshold=True) == ArtifactTerms(fraud_threshold=honoured)


def test_the_fleets_line_runs_between_30_and_31_mismatches_of_200(jobs: JobStore) -> None:
    def convicted(n_wrong: int) -> bool:
        claimed = VECTORS[1:2] * n_wrong + VECTORS[:1] * (200 - n_wrong)
        answer = validate(jobs, claimed, VECTORS[:1] * 200, dist_threshold=0.4, p_mismatch=0.1)
        assert answer["fraud_threshold"] == 0.01
        return bool(answer["fraud_detected"])

    assert (convicted(30), convicted(31)) == (False, True)
