"""/health for the network's client, /livez and /readyz for supervisors and load balancers."""

from fastapi import APIRouter

from api.errors import unavailable
from api.schema import examples
from api.services import AppServices, Services
from poc_core import answers

router = APIRouter(tags=["health"])


@router.get("/livez", summary="This process lives")
async def livez() -> answers.Health:
    """Always 200; asks neither Redis nor workers, which a restart of the API would not help."""
    return answers.Health()


@router.get("/health", summary="An engine can answer", responses=examples.REDIS_AWAY)
def health(services: AppServices) -> answers.Health:
    """200 while a worker whose engine goes on is ready, else 503. Supervisors use /livez."""
    _models(services)
    return answers.Health()


@router.get("/readyz", summary="The node can compute", responses=examples.REDIS_AWAY)
@router.get("/ready", summary="The node can compute", responses=examples.REDIS_AWAY)
def ready(services: AppServices) -> answers.Ready:
    """200 when Redis answers and a worker is ready, else 503 with Retry-After."""
    return answers.Ready(models=_models(services))


def _models(services: Services) -> list[str]:
    """Models that a worker is ready for. HTTPException 503: there are none."""
    workers = services.workers.live()
    models = sorted({worker.model for worker in workers if worker.is_ready})
    if not models and any(worker.state == "hung" for worker in workers):
        raise unavailable(
            "No worker is ready: an engine hangs, and its worker ends to be started again."
        )
    if not models:
        raise unavailable(
            "No worker is ready: none is started yet, or they still load their model."
        )
    return models
