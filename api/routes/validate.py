"""/api/v1/pow/validate: checking a batch reported in a round (protocol.md, section 3)."""

from dataclasses import replace
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, HTTPException, Request, Response

from api import bodies
from api.edge.shares import client_of
from api.routes import examples
from api.routes.reference import json_body
from api.routes.services import AppServices
from poc_core.answers import one_of
from poc_core.records import RoundConfig, RoundState
from poc_core.schemes.contract import contract_of
from poc_core.state.rounds import RoundStore

router = APIRouter(prefix="/api/v1/pow", tags=["rounds"])


@router.post(
    "/validate",
    summary="Recompute a batch of distances and validate it",
    response_model=None,
    openapi_extra=json_body(bodies.batch_bodies()),
    responses={
        200: {"model": one_of(*(body.answer for body in bodies.batch_bodies().values()))},
        **examples.PROOF_BATCH_ERRORS,
    },
)
async def validate(request: Request, services: AppServices) -> Response | dict[str, Any]:
    """Checks the batch with the r_target, fraud_threshold, seq_len and randomization of the round
    that is validating.

    The verdict also goes to the round's callback_url.
    """
    scheme, body = bodies.parse_body(
        await bodies.whole_body(request), services.settings.max_queued_nonces, bodies.batch_bodies()
    )
    job = await to_thread.run_sync(lambda: body.job(_validating_round(services.rounds, scheme)))
    if not job.nonces:
        return contract_of(scheme).verdict(job.spec, job.request, [], [], [])
    job = replace(job, client=client_of(request.scope))
    job_id = await to_thread.run_sync(services.admission.queue, job)
    return await services.inline.answer_when_ended(request, job_id)


def _validating_round(rounds: RoundStore, scheme: str) -> RoundConfig:
    """Returns the configuration of the validating round. Raises HTTPException 400 if there is none,
    or it was stopped.
    """
    current = rounds.current()
    if current is None or current.config.spec.scheme != scheme:
        raise HTTPException(
            400, f"No {scheme} round was initialised; send POST /init/validate first."
        )
    if current.state is RoundState.STOPPED:
        raise HTTPException(400, "The round was stopped; send POST /init/validate first.")
    if current.state is not RoundState.VALIDATING:
        what = "generates" if current.state is RoundState.GENERATING else "was only initialised"
        raise HTTPException(400, f"The round {what}; send POST /phase/validate first.")
    return current.config
