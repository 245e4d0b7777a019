"""The paths of the network's aggregators: the same jobs and rounds, with one entry per worker."""

import zlib
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request

from api.proofs import round_control
from api.routes import pow
from api.schema import examples
from api.schema.bodies import parse_round, round_bodies, whole_body
from api.schema.openapi import json_body
from api.services import AppServices
from poc_core.records import RoundRecord, RoundState, WorkerRecord

router = APIRouter(prefix="/api/v1", tags=["aggregator"])


@router.post(
    "/inference/pow/init/generate",
    summary="Start a round",
    openapi_extra=json_body(round_bodies()),
    responses=examples.ROUND_ERRORS,
)
async def init_generate(request: Request, services: AppServices) -> dict[str, Any]:
    """Like /api/v1/pow/init/generate. The workers share the nonces."""
    body = parse_round(await whole_body(request), round_bodies())
    workers = await to_thread.run_sync(services.round_control.start, body, RoundState.GENERATING)
    return {
        "status": "OK",
        "backends": len(workers),
        "n_groups": len(workers),
        "results": [{"port": backend_number(worker), "status": "OK"} for worker in workers],
        "errors": None,
    }


router.add_api_route(
    "/inference/pow/generate", pow.generate, methods=["POST"], **pow.GENERATE_ROUTE
)
router.add_api_route(
    "/inference/pow/generate/{request_id}", pow.read_job, methods=["GET"], **pow.READ_ROUTE
)


@router.get(
    "/inference/pow/status",
    summary="Show each worker's state and rate",
    responses=examples.REDIS_AWAY,
)
def status(services: AppServices) -> dict[str, Any]:
    """GENERATING or IDLE if all workers are, MIXED if they differ, NO_BACKENDS without workers.

    GENERATING too, with a `reason`, while a round's only worker is being replaced: for 10 minutes.
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


@router.post(
    "/inference/pow/stop",
    summary="Stop the round and cancel the jobs",
    responses=examples.REDIS_AWAY,
)
def stop(services: AppServices) -> dict[str, Any]:
    """Like /api/v1/pow/stop, with one entry for each ready worker."""
    services.round_control.stop()
    results = [
        {"port": backend_number(worker), "status": "stopped"} for worker in services.workers.ready()
    ]
    return {"status": "OK", "results": results, "errors": None}


def backend_number(worker: WorkerRecord) -> int:
    """A number for a worker's life that tells it from the others, as aggregators expect."""
    return worker.port or 10_000 + zlib.crc32(worker.id.encode()) % 50_000


def _backend(
    worker: WorkerRecord, current: RoundRecord | None, stats: dict[str, Any]
) -> dict[str, Any]:
    """A worker as aggregators read it; `stats`: its own of the current round."""
    serves = current is not None and current.config.model == worker.model
    generates = serves and current is not None and current.state is RoundState.GENERATING
    return {
        "port": backend_number(worker),
        "status": "GENERATING" if generates else "IDLE",
        "config": round_control.config_of(current.config)
        if serves and current is not None
        else None,
        "stats": {"total_processed": 0, "nonces_per_second": 0.0} | stats,
    }
