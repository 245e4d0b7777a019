"""Health checks for the network node, supervisors and load balancers; Prometheus metrics; clock."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client.exposition import choose_encoder

from api.errors import RETRY_AFTER_S, unavailable
from api.health.judgement import Level
from api.routes import examples
from api.routes.services import AppServices
from poc_core import answers
from poc_core.serving.deployments import HostState
from poc_core.state.overview import Overview

router = APIRouter(tags=["health"])


@router.get("/livez", summary="Check that the API runs")
async def livez() -> answers.Health:
    """Always answers 200, even without Redis and workers: restarting the API repairs neither."""
    return answers.Health()


@router.get(
    "/health",
    summary="Check that an engine can answer",
    response_model_exclude_none=True,
    responses=examples.REDIS_AWAY,
)
def health(services: AppServices) -> answers.EngineHealth:
    """Answers 200 while a ready worker's engine makes progress, or while the node waits for its
    first deployment; else 503. Supervisors should use /livez instead.

    Also answers 200, with a `reason`, for 10 minutes while a round's only worker is being replaced.
    """
    seen = services.overviews.read()
    stopped = {host.id for host in seen.deployment.hosts if host.state is HostState.KEEPING}
    workers = [worker for worker in seen.workers if worker.host_id not in stopped]
    if any(worker.is_ready for worker in workers) or _waits_for_its_first_deployment(seen):
        return answers.EngineHealth()
    if (reason := services.health.replacement(seen)) is not None:
        return answers.EngineHealth(reason=reason)
    why = (
        "no model is deployed" if stopped else services.health.of(seen).text(services.health.now())
    )
    raise unavailable(f"No worker is ready: {why}.")


_READY: dict[str, Any] = {
    "summary": "Check that the node can compute",
    "response_model": answers.Ready,
    "responses": examples.NOT_READY,
}


@router.get("/readyz", **_READY)
@router.get("/ready", **_READY)
def ready(services: AppServices) -> answers.Ready | JSONResponse:
    """Answers 200 if Redis answers and a worker is ready, else 503 with Retry-After and reasons.

    Also answers 200 while a round's only worker is being replaced, like /health.
    """
    health, seen = services.health.read()
    now = services.health.now()
    whole = answers.NodeHealth(**services.health.answer(health))
    if seen is not None and (
        health.level is not Level.DOWN or services.health.replacement(seen) is not None
    ):
        ready = {seat.worker.model for seat in health.seats if seat.is_ready and seat.worker}
        return answers.Ready(models=sorted(ready), health=whole)
    why = "The node cannot reach its Redis" if seen is None else "No worker is ready"
    refusal = answers.NotReady(detail=f"{why}: {health.text(now)}.", health=whole)
    return JSONResponse(refusal.model_dump(), 503, {"Retry-After": str(RETRY_AFTER_S)})


def _waits_for_its_first_deployment(seen: Overview) -> bool:
    """Returns True if a host has registered, but no model was ever deployed and no worker runs."""
    status = seen.deployment
    nothing = not seen.workers and status.record is None
    return nothing and bool(status.hosts) and status.is_gone


@router.get("/api/v1/clock", summary="Read this machine's clock", status_code=204)
async def clock() -> Response:
    """Returns when the request arrived (X-Server-Recv-Ns) and was answered (X-Server-Send-Ns).

    Both are Unix times in nanoseconds. Needs no key.
    """
    received = time.time_ns()
    response = Response(status_code=204, headers={"X-Server-Recv-Ns": str(received)})
    response.headers["X-Server-Send-Ns"] = str(time.time_ns())
    return response


@router.get(
    "/metrics",
    summary="Read metrics for Prometheus",
    response_class=Response,
    responses={
        200: {
            "content": {"text/plain": {}, "application/openmetrics-text": {}},
            "description": "Prometheus' text format, or OpenMetrics if requested.",
        },
        **examples.REDIS_AWAY,
    },
)
def metrics(request: Request, services: AppServices) -> Response:
    """Returns metrics of the round, outbox, jobs, workers and chat. Each API process can answer."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(services.metrics), headers={"content-type": content_type})
