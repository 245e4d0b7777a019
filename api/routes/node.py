"""The network node's paths to manage the node: its state, and deploying and stopping a model."""

from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from api.bodies import DeployBody
from api.errors import unavailable
from api.health.roster import deployment_state
from api.routes import examples
from api.routes.services import AppServices
from api.version import VERSION
from poc_core import answers
from poc_core.records import RoundState
from poc_core.serving.deployments import DeploymentState, HostReport
from poc_core.settings import Settings

router = APIRouter(prefix="/api/v1", tags=["node"], responses=examples.REDIS_AWAY)


# MLNode's terms for a deployment; "cancelled" is one that was withdrawn while it was loading.
_STARTUP: dict[DeploymentState, answers.StartupStatus] = {
    DeploymentState.IDLE: "not_started",
    DeploymentState.STARTING: "in_progress",
    DeploymentState.RUNNING: "completed",
    DeploymentState.FAILED: "failed",
}


@router.get("/state", summary="Show whether the node serves a model")
def state(services: AppServices) -> answers.NodeState:
    """Returns INFERENCE while a model is served, also during a round. Otherwise returns STOPPED,
    also while a model loads.
    """
    status, current = services.deployments.status(), services.rounds.current()
    ready = sorted({worker.model for worker in services.workers.ready()})
    if status.hosts:
        serves = status.state is DeploymentState.RUNNING
        loaded = status.wanted.label if serves and status.wanted else ""
    else:  # workers without a supervisor
        serves, loaded = bool(ready), ready[0] if ready else ""
    return answers.NodeState(
        state="INFERENCE" if serves else "STOPPED",
        version=VERSION,
        poc_status=(current.state if current is not None else RoundState.IDLE).activity.value,
        inference_healthy=serves
        and (not status.hosts or status.wanted is None or status.wanted.name in ready),
        loaded_model=loaded,
        poc_validation_inference=_chats_beside_proofs(services.settings),
    )


@router.post("/stop", summary="End the round and the engines", responses=examples.STOP_ERRORS)
async def stop(services: AppServices) -> answers.Done:
    """Answers once the engines have ended. Cancels all jobs. The round's results are delivered.

    Engines that are loading are kept for 120 s; an identical /inference/up uses these engines.
    """
    generation = await to_thread.run_sync(services.deploying.withdraw, True)
    return await services.deploying.until_gone(generation)


@router.post(
    "/inference/down", summary="End the round and all engines", responses=examples.STOP_ERRORS
)
async def down(services: AppServices) -> answers.Done:
    """Works like /api/v1/stop, but also ends engines that are loading."""
    generation = await to_thread.run_sync(services.deploying.withdraw, False)
    return await services.deploying.until_gone(generation)


@router.post(
    "/inference/up",
    summary="Deploy a model",
    response_model=answers.Done,
    responses=examples.DEPLOY_ERRORS,
)
async def up(body: DeployBody, request: Request, services: AppServices) -> Response | answers.Done:
    """Answers once one host serves the model; the others follow. If the client disconnects, the
    deployment continues.
    """
    generation = await to_thread.run_sync(services.deploying.deploy, body)
    return await services.deploying.until_served(request, generation)


@router.post(
    "/inference/up/async",
    summary="Deploy a model, without waiting",
    responses=examples.DEPLOY_ERRORS,
)
def up_async(body: DeployBody, services: AppServices) -> answers.Done:
    """Answers at once; /api/v1/inference/up/status shows the progress."""
    services.deploying.deploy(body)
    return answers.Done()


@router.get("/inference/up/status", summary="Show the progress of the deployment")
def up_status(services: AppServices) -> answers.UpStatus:
    """Returns `status` (idle, starting, running or failed), and in `hosts` each host's status."""
    seen = services.overviews.read()
    status, workers = seen.deployment, seen.workers
    running = [worker for worker in workers if worker.is_ready]
    starting = [worker for worker in workers if worker.state == "starting"]
    found, record = deployment_state(status, workers), status.record
    was_cancelled = record is not None and record.cancelled
    elapsed_s = None
    # After a restart of the node, the record has the times of the first start.
    if record and record.wanted and not (record.settled_at and found is DeploymentState.STARTING):
        elapsed_s = services.deployments.elapsed_s(record)
    return answers.UpStatus(
        is_running=found is DeploymentState.RUNNING,
        status=found.value,
        startup_status="cancelled" if was_cancelled else _STARTUP[found],
        elapsed_seconds=elapsed_s,
        error=record.error if record else None,
        model=status.wanted.model if status.wanted else None,
        left_out=list(status.wanted.left_out) if status.wanted else [],
        hosts=[answers.HostStatus(**_host(host)) for host in status.hosts],
        is_starting=found is DeploymentState.STARTING,
        models=sorted({worker.model for worker in running}),
        workers_running=len(running),
        workers_starting=len(starting),
        health=answers.NodeHealth(**services.health.answer(services.health.of(seen))),
    )


@router.get("/versions", summary="Show the versions of Proofline and vLLM")
def versions(services: AppServices) -> answers.Versions:
    """Returns the versions of vLLM and of Proofline (`version`, as in `proofline --version`)."""
    return answers.Versions(
        version=VERSION,
        vllm_version=services.deployments.status().vllm_versions or None,
        poc_validation_inference=_chats_beside_proofs(services.settings),
    )


@router.get("/encrypted/identity", include_in_schema=False)
def encrypted_identity() -> None:
    """Answers 503, so that the network node sends no encrypted requests."""
    raise unavailable("This node takes no encrypted requests.")


def _host(report: HostReport) -> dict[str, Any]:
    told = {"id", "host", "model", "workers", "ready", "error", "left_out", "follows"}
    return report.model_dump(include=told) | {"state": report.state.value.lower()}


def _chats_beside_proofs(settings: Settings) -> bool:
    return settings.chat.mode not in ("exclusive", "off")
