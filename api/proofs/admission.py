"""From the bytes of a request to a stored job whose workers are woken, or why there is none."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import HTTPException

from api.errors import unavailable
from api.proofs.dispatch import Dispatcher
from api.proofs.waiting import InlineJobs
from api.schema.bodies import job_bodies, parse_body
from poc_core.errors import BodyError, ForbiddenReceiverError
from poc_core.records import JobRequest, ModelInfo, NewJob, ProofSpec
from poc_core.schemes import contract_of, contracts
from poc_core.schemes.requests import JobBody
from poc_core.settings import Settings
from poc_core.state import JobStore, WorkerRegistry

# From this size on, requests are taken one at a time; smaller ones pass them by.
_LARGE_BYTES = 256 * 1024
# Large requests parsed and stored at once: 100,000 artifacts take 100 MB and a second.
_LARGE_AT_ONCE = 1


class Admission:
    """Requests for jobs: checked and stored; workers are woken."""

    def __init__(
        self,
        settings: Settings,
        jobs: JobStore,
        workers: WorkerRegistry,
        dispatcher: Dispatcher,
        inline: InlineJobs,
    ) -> None:
        self._settings = settings
        self._jobs = jobs
        self._workers = workers
        self._dispatcher = dispatcher
        self._inline = inline
        self._large = CapacityLimiter(_LARGE_AT_ONCE)

    async def submit(self, raw: bytes, client: str) -> tuple[str, NewJob]:
        """Checks and stores a job, in a thread; errors are the client's answer."""
        limiter = self._large if len(raw) >= _LARGE_BYTES else None
        return await to_thread.run_sync(self._submit, raw, client, limiter=limiter)

    def _submit(self, raw: bytes, client: str) -> tuple[str, NewJob]:
        _, body = parse_body(raw, self._settings.max_queued_nonces, job_bodies())
        job = replace(admit(body, self._settings, self._workers), client=client)
        return self.queue(job), job

    def queue(self, job: NewJob) -> str:
        """Stores a job and wakes the workers; returns its id.

        A job whose client waits has entered `InlineJobs`. HTTPException 429: too many wait.
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


def admit(body: JobBody, settings: Settings, workers: WorkerRegistry) -> NewJob:
    """The job of a request. HTTPException 409 or 503, or ClaimsError: why there can be none."""
    check_receiver(body.url, settings)
    spec, claimed = body.spec(), body.claims()
    limits = deployed_limits(body.params.model, workers)
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


def check_receiver(url: str | None, settings: Settings, field: str = "url") -> None:
    """BodyError: POC_CALLBACK_ALLOW forbids the address. A name is resolved when it is tried."""
    if url is None:
        return
    try:
        settings.callbacks.check_url(url, settings.own_ports)
    except ForbiddenReceiverError as error:
        raise BodyError(str(error), (field,), "url_not_allowed") from None


def deployed_limits(model: str, workers: WorkerRegistry, for_round: bool = False) -> ModelInfo:
    """Returns the limits that every worker of the model meets. 409: other models are served; 503:
    no worker is.

    `for_round`: others count only while one is ready: the network node takes 409 for a wrong name.
    """
    infos = [worker.info for worker in workers.ready(model) if worker.info is not None]
    if infos:
        # A batch may go to any of them, so the smallest one sets the limits.
        return replace(
            infos[0],
            max_seq_len=min(info.max_seq_len for info in infos),
            max_batch_tokens=min(info.max_batch_tokens for info in infos),
            max_sequences=min(info.max_sequences for info in infos),
            schemes={
                contract.name: own for contract in contracts() if (own := contract.common(infos))
            },
        )
    live, known = workers.live(), workers.known_models()
    if model in known or any(worker.model == model for worker in live):
        raise unavailable(
            f"No worker serves the model {model} right now; try again when one has started."
        )
    # Live models first: a client should ask for one of these.
    deployed = list(dict.fromkeys([*(worker.model for worker in live), *known]))
    if deployed and (not for_round or any(worker.is_ready for worker in live)):
        raise _mismatch(
            f"The model {model} is not deployed here; ask for {' or '.join(deployed)}.",
            {"model": (model, deployed[0] if len(deployed) == 1 else deployed)},
        )
    raise unavailable("No worker serves a model yet; try again when one has started.")


def check_limits(info: ModelInfo, spec: ProofSpec) -> None:
    """HTTPException 409 when the model cannot do what the spec asks for."""
    asked = contract_of(spec.scheme).limits(spec, info)
    fields = {name: (wanted, most) for name, (wanted, most) in asked.items() if wanted > most}
    if fields:
        limits = " and ".join(f"{name} at most {most}" for name, (_, most) in fields.items())
        raise _mismatch(f"The model {info.name} takes {limits}.", fields)


def _mismatch(message: str, fields: Mapping[str, tuple[Any, Any]]) -> HTTPException:
    """HTTPException 409; `fields`: name -> (requested, deployed)."""
    return HTTPException(
        409,
        {
            "error": "params_mismatch",
            "message": message,
            "fields": list(fields),
            "requested": {name: requested for name, (requested, _) in fields.items()},
            "deployed": {name: deployed for name, (_, deployed) in fields.items()},
        },
    )
