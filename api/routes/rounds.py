"""/api/v1/pow: starting and switching rounds (protocol.md, section 5)."""

from anyio import to_thread
from fastapi import APIRouter, Request

from api import bodies
from api.routes import examples
from api.routes.reference import json_body
from api.routes.services import AppServices
from poc_core import answers
from poc_core.records import RoundState

router = APIRouter(prefix="/api/v1/pow", tags=["rounds"], responses=examples.REDIS_AWAY)


_PHASED_BODY = json_body(bodies.phased_round_bodies())


@router.post(
    "/init/generate",
    summary="Start a round",
    openapi_extra=json_body(bodies.round_bodies()),
    responses=examples.ROUND_ERRORS,
)
async def init_generate(request: Request, services: AppServices) -> answers.RoundChanged:
    """Starts a round; a distance round if `r_target` is set. Workers compute until /stop."""
    body = await bodies.round_body(request, bodies.round_bodies())
    await to_thread.run_sync(services.round_control.start, body, RoundState.GENERATING)
    return answers.round_changed(RoundState.GENERATING)


@router.post(
    "/init",
    summary="Store a distance round",
    openapi_extra=_PHASED_BODY,
    responses=examples.ROUND_ERRORS,
)
async def init(request: Request, services: AppServices) -> answers.RoundChanged:
    """Stores a round without starting it; /phase/generate starts it."""
    body = await bodies.round_body(request, bodies.phased_round_bodies())
    await to_thread.run_sync(services.round_control.start, body, RoundState.IDLE)
    return answers.round_changed(RoundState.IDLE)


@router.post(
    "/init/validate",
    summary="Store a distance round that validates",
    openapi_extra=_PHASED_BODY,
    responses=examples.ROUND_ERRORS,
)
async def init_validate(request: Request, services: AppServices) -> answers.RoundChanged:
    """Stores a validating round, whose r_target and seq_len /validate uses to check batches."""
    body = await bodies.round_body(request, bodies.phased_round_bodies())
    await to_thread.run_sync(services.round_control.start, body, RoundState.VALIDATING)
    return answers.round_changed(RoundState.VALIDATING)


@router.post(
    "/phase/generate",
    summary="Switch the stored round to generating",
    responses=examples.PHASE_ERRORS,
)
def phase_generate(services: AppServices) -> answers.RoundChanged:
    """Starts generating, or continues where the round's earlier generating phase ended."""
    services.round_control.switch(RoundState.GENERATING)
    return answers.round_changed(RoundState.GENERATING)


@router.post(
    "/phase/validate",
    summary="Switch the stored round to validating",
    responses=examples.PHASE_ERRORS,
)
def phase_validate(services: AppServices) -> answers.RoundChanged:
    """Makes workers stop generating within one micro-batch, and serve /validate and jobs."""
    services.round_control.switch(RoundState.VALIDATING)
    return answers.round_changed(RoundState.VALIDATING)
