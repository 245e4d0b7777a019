"""The answer of a completed validation."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from poc_core.encoding import encode_vectors
from poc_core.records import NewJob
from poc_core.schemes.artifact.terms import StatTest
from poc_core.state import JobStore
from tests.samples import K_DIM, MODEL, REQUEST, SPEC, result_body

VECTORS = encode_vectors(np.eye(K_DIM, dtype=np.float32))


@pytest.fixture(autouse=True)
def a_worker(serve: Callable[..., Any]) -> None:
    serve("w1")


def validate(jobs: JobStore, claimed: list[str], computed: list[str | None], **test: float) -> dict[str, Any]:
    request = REQUEST.model_copy(update={"terms": StatTest(**test).model_dump()})
    nonces = list(range(len(claimed)))
    job_id = jobs.create(NewJob(MODEL, SPEC, request, nonces, len(nonces), dict(zip(nonces, claimed, strict=True))))
    jobs.claim(job_id, 0, "w1")
    jobs.complete(job_id, 0, computed)
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
        "n_excluded": 0,
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


def test_clients_may_call_the_fraud_threshold_p_value_threshold() -> None:
    assert StatTest.model_validate_json('{"p_value_threshold": 0.5}').fraud_threshold == 0.5
    assert StatTest.model_validate_json('{"fraud_threshold": 0.5}').fraud_threshold == 0.5
    assert StatTest() == StatTest(dist_threshold=0.02, p_mismatch=0.001, fraud_threshold=0.01)
