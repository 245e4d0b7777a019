"""Admits jobs: parses and checks a request's body, stores the job and wakes workers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from anyio import CapacityLimiter, to_thread

from api.bodies import job_bodies, parse_body
from api.proofs.checks import check_limits, check_receiver, deployed_limits
from api.proofs.dispatch import Dispatcher
from api.proofs.waiting import InlineJobs
from poc_core.records import JobRequest, NewJob
from poc_core.schemes.contract import contract_of
from poc_core.schemes.requests import JobBody
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry

# Requests of at least this size are parsed one at a time; smaller requests do not wait for them.
_LARGE_BYTES = 256 * 1024
# Most large requests parsed and stored at once: 100,000 artifacts take 100 MB and a second.
_LARGE_AT_ONCE = 1


@dataclass(frozen=True)
class Admission:
    _settings: Settings
    _jobs: JobStore
    _workers: WorkerRegistry
    _dispatcher: Dispatcher
    _inline: InlineJobs
    _keeping: Callable[[], Collection[str]]  # ids of hosts whose model was stopped
    _large: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_LARGE_AT_ONCE))

    async def submit(self, raw: bytes, client: str) -> tuple[str, NewJob]:
        """Parses, checks and stores the job in a JSON body, in a thread. Returns (job id, job)."""
        limiter = self._large if len(raw) >= _LARGE_BYTES else None
        return await to_thread.run_sync(self._submit, raw, client, limiter=limiter)

    def _submit(self, raw: bytes, client: str) -> tuple[str, NewJob]:
        _, body = parse_body(raw, self._settings.max_queued_nonces, job_bodies())
        admitted = admit(body, self._settings, self._workers, self._keeping())
        job = replace(admitted, client=client)
        return self.queue(job), job

    def queue(self, job: NewJob) -> str:
        """Stores a job, wakes the model's workers, and returns the job's id.

        Counts an inline job's request as waiting for the result. HTTPException 429 at the limit.
        """
        if job.inline:
            self._inline.enter()
        try:
            n_workers = self._workers.count()
            job_id = self._jobs.create(job)
            self._dispatcher.wake(job.model, min(job.n_batches, n_workers))
            return job_id
        except BaseException:
            if job.inline:
                self._inline.leave()
            raise


def admit(
    body: JobBody, settings: Settings, workers: WorkerRegistry, keeping: Collection[str]
) -> NewJob:
    """Returns the job that a body requests. Raises the error for the client if the job fails a
    check.
    """
    check_receiver(body.url, settings)
    spec, claimed = body.spec(), body.claims()
    limits = deployed_limits(body.params.model, workers, keeping)
    check_limits(limits, spec)
    batch_size = body.batch_size or settings.batch_size_default
    return NewJob(
        model=body.params.model,
        spec=spec,
        request=JobRequest(
            block_height=body.block_height,
            node_id=body.node_id,
            node_count=body.node_count,
            url=body.url,
            terms=body.terms(settings.honour_p_value_threshold),
        ),
        nonces=body.nonces,
        batch_size=min(batch_size, contract_of(spec.scheme).max_batch(spec, limits)),
        claimed=claimed,
        inline=body.wait,
    )
