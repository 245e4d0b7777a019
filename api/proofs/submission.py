"""From the bytes of a request to a stored job whose batches are published."""

from dataclasses import dataclass, replace

from anyio import to_thread

from api.errors import unavailable
from api.proofs.admission import admit
from api.schema.bodies import job_bodies, parse_body
from api.services import Services
from poc_core.records import NewJob

# From this size on, requests are taken one at a time; smaller ones pass them by.
_LARGE_BYTES = 256 * 1024


@dataclass(frozen=True)
class Submitted:
    job_id: str
    n_nonces: int
    wait: bool


async def submit(raw: bytes, services: Services) -> Submitted:
    """Checks and stores a job, in a thread; errors are the client's answer, and store nothing."""
    limiter = services.large_bodies if len(raw) >= _LARGE_BYTES else None
    return await to_thread.run_sync(_submit, raw, services, limiter=limiter)


def _submit(raw: bytes, services: Services) -> Submitted:
    _, body = parse_body(raw, services.settings.max_queued_nonces, job_bodies())
    job = admit(body, services.settings, services.workers)
    if not body.wait:
        return Submitted(queue(job, services), len(job.nonces), body.wait)
    return Submitted(queue_to_wait(job, services), len(job.nonces), body.wait)


def queue(job: NewJob, services: Services) -> str:
    """Stores a job and tells the workers; returns its id."""
    job_id = services.jobs.create(job)
    services.dispatcher.publish(job.model, job_id, job.n_batches)
    return job_id


def queue_to_wait(job: NewJob, services: Services) -> str:
    """As `queue`, for a request that waits (`answer_when_ended`). HTTPException 429: no place."""
    if not services.waiting.take():
        raise unavailable(
            f"{services.waiting.limit} requests wait for their jobs already"
            " (POC_MAX_WAITING_REQUESTS); send it with wait=false and poll, or try again later.",
            429,
        )
    try:
        return queue(replace(job, inline=True), services)
    except BaseException:
        services.waiting.leave()
        raise
