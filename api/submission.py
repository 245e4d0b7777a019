"""From the bytes of a request to a stored job whose batches are published."""

from dataclasses import dataclass

from anyio import to_thread

from api.admission import admit
from api.bodies import job_bodies, parse_body
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
    """Checks and stores a job, in a thread; raises what becomes the answer, and then nothing was stored."""
    limiter = services.large_bodies if len(raw) >= _LARGE_BYTES else None
    return await to_thread.run_sync(_submit, raw, services, limiter=limiter)


def _submit(raw: bytes, services: Services) -> Submitted:
    _, body = parse_body(raw, services.settings.max_queued_nonces, job_bodies())
    job = admit(body, services.settings, services.workers)
    return Submitted(queue(job, services), len(job.nonces), body.wait)


def queue(job: NewJob, services: Services) -> str:
    """Stores a job and tells the workers; its id."""
    job_id = services.jobs.create(job)
    services.dispatcher.publish(job.model, job_id, job.n_batches)
    return job_id
