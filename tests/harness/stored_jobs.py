"""Computes, reads and leases jobs in Redis."""

from collections.abc import Callable
from typing import Any

from poc_core.records import JobRecord, JobStatus, Lease, Refusal
from poc_core.state.jobs import JobStore
from tests.harness.samples import MODEL, complete_batch, known, lease_batch, leased, work_of

Serve = Callable[..., Any]


def compute(jobs: JobStore, job_id: str, index: int, worker: str = "w1") -> bool:
    lease = leased(lease_batch(jobs, job_id, index, worker))
    return complete_batch(jobs, job_id, index, [f"v{nonce}" for nonce in lease.nonces])


def read(jobs: JobStore, job_id: str) -> JobRecord:
    return known(jobs.read(job_id))


def status(jobs: JobStore, job_id: str) -> JobStatus:
    return read(jobs, job_id).status


def lease_next(
    jobs: JobStore, room: int = 0, worker: str = "w1", only_validations: bool = False
) -> list[Lease]:
    """What a worker gets that has room for further nonces beside the next batch."""
    work = work_of(jobs, worker)
    found = work.lease(MODEL, only_validations)
    if isinstance(found, Refusal):
        return []
    return [*found, *(more for lease in found for more in work.lease_more(lease, room))]
