"""Submits and computes a job over HTTP."""

import base64
from typing import Any

from fastapi.testclient import TestClient

from poc_core.records import JobRecord
from poc_core.state.jobs import JobStore
from tests.harness.samples import K_DIM, body, complete_batch, known, lease_batch, leased

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
