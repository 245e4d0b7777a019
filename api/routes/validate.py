"""/api/v1/pow/validate: judging somebody's batch of distances (protocol.md, section 3)."""

from anyio import to_thread
from fastapi import APIRouter, HTTPException, Request, Response

from api import answers, examples
from api.bodies import parse_body, whole_body
from api.openapi import json_body
from api.round_bodies import ProofBatchBody
from api.services import AppServices, Services
from api.submission import queue
from api.waiting import answer_when_ended
from poc_core.records import JobRequest, NewJob, RoundConfig, RoundState, StatTest
from poc_core.state.results import validated_batch

router = APIRouter(prefix="/api/v1/pow", tags=["rounds"])


@router.post(
    "/validate",
    summary="Recompute a batch of distances and judge it",
    response_model=None,
    openapi_extra=json_body(ProofBatchBody, examples.PROOF_BATCH_BODIES),
    responses={200: {"model": answers.ValidatedBatch}, **examples.PROOF_BATCH_ERRORS},
)
async def validate(request: Request, services: AppServices) -> Response | dict[str, object]:
    """Judged by the r_target, fraud_threshold, seq_len and randomization of the round that validates; sent to its
    callback_url too."""
    body = parse_body(await whole_body(request), services.settings.max_queued_nonces, ProofBatchBody)
    job = await to_thread.run_sync(_job, body, services)
    if not body.nonces:
        return {"status": "OK", **validated_batch(job.spec, job.request, [], [], [])}
    job_id = await to_thread.run_sync(queue, job, services)
    return await answer_when_ended(request, services, job_id)


def _job(body: ProofBatchBody, services: Services) -> NewJob:
    config = _validating_round(services)
    return NewJob(
        model=config.model,
        spec=config.spec.model_copy(update={"block_hash": body.block_hash, "public_key": body.public_key}),
        request=JobRequest(
            block_height=body.block_height,
            node_id=body.node_id,
            node_count=config.node_count,
            url=config.url,
            stat_test=StatTest(fraud_threshold=config.fraud_threshold),
            r_target=config.r_target,
        ),
        nonces=body.nonces,
        batch_size=config.batch_size,
        claimed=dict(zip(body.nonces, body.dist, strict=True)),
    )


def _validating_round(services: Services) -> RoundConfig:
    """HTTPException 400 says which step is missing."""
    current = services.rounds.current()
    if current is None or current.config.r_target is None:
        raise HTTPException(400, "No distance round was initialised; send POST /init/validate first.")
    if current.state is RoundState.STOPPED:
        raise HTTPException(400, "The round was stopped; send POST /init/validate first.")
    if current.state is not RoundState.VALIDATING:
        what = "generates" if current.state is RoundState.GENERATING else "was only initialised"
        raise HTTPException(400, f"The round {what}; send POST /phase/validate first.")
    return current.config
