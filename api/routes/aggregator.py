"""Routes for the network's aggregators, which see each worker as one of several backends."""

import zlib
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request

from api import bodies
from api.routes import examples
from api.routes.reference import json_body
from api.routes.services import AppServices
from poc_core.records import RoundRecord, RoundState, WorkerRecord

router = APIRouter(prefix="/api/v1", tags=["aggregator"], responses=examples.REDIS_AWAY)


@router.post(
    "/inference/pow/init/generate",
    summary="Start a round",
    openapi_extra=json_body(bodies.round_bodies()),
    responses=examples.ROUND_ERRORS,
)
async def init_generate(request: Request, services: AppServices) -> dict[str, Any]:
    """Works like /api/v1/pow/init/generate. The workers divide the nonces among them."""
    body = await bodies.round_body(request, bodies.round_bodies())
    workers = await to_thread.run_sync(services.round_control.start, body, RoundState.GENERATING)
    return {
        "status": "OK",
        "backends": len(workers),
        "n_groups": len(workers),
        "results": [{"port": backend_number(worker), "status": "OK"} for worker in workers],
        "errors": None,
    }


@router.get("/inference/pow/status", summary="Show each worker's state and rate")
def status(services: AppServices) -> dict[str, Any]:
    """Returns each worker's state. `status` is GENERATING or IDLE if all workers agree, else MIXED.

    Without a ready worker: NO_BACKENDS, but GENERATING with a `reason` for 10 minutes while a
    round's only worker is being replaced.
    """
    seen = services.overviews.read()
    current = seen.round.record if seen.round is not None else None
    stats = services.round_control.stats_of(seen)["workers"]
    backends = [
        _backend(worker, current, stats.get(worker.id, {}))
        for worker in seen.workers
        if worker.is_ready
    ]
    if not backends and (reason := services.health.replacement(seen)) is not None:
        return {"status": "GENERATING", "backends": [], "reason": reason}
    states = {backend["status"] for backend in backends}
    overall = "NO_BACKENDS" if not states else "MIXED" if len(states) > 1 else states.pop()
    return {"status": overall, "backends": backends}


@router.post("/inference/pow/stop", summary="Stop the round and cancel the jobs")
def stop(services: AppServices) -> dict[str, Any]:
    """Works like /api/v1/pow/stop. Returns one entry for each ready worker."""
    services.round_control.stop()
    results = [
        {"port": backend_number(worker), "status": "stopped"} for worker in services.workers.ready()
    ]
    return {"status": "OK", "results": results, "errors": None}


def backend_number(worker: WorkerRecord) -> int:
    """Returns the number by which aggregators identify a worker: its port, or a hash of its id."""
    return worker.port or 10_000 + zlib.crc32(worker.id.encode()) % 50_000


def _backend(
    worker: WorkerRecord, current: RoundRecord | None, stats: dict[str, Any]
) -> dict[str, Any]:
    serves = current is not None and current.config.model == worker.model
    generates = serves and current is not None and current.state is RoundState.GENERATING
    return {
        "port": backend_number(worker),
        "status": "GENERATING" if generates else "IDLE",
        "config": bodies.config_of(current.config) if serves and current is not None else None,
        "stats": {"total_processed": 0, "nonces_per_second": 0.0} | stats,
    }
