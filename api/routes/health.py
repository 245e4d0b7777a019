"""/health and /ready, for supervisors and load balancers."""

from fastapi import APIRouter

from api import answers, examples
from api.errors import unavailable
from api.services import AppServices

router = APIRouter(tags=["health"])


@router.get("/health", summary="This process lives")
async def health() -> answers.Health:
    """Always 200; asks neither Redis nor workers, so that a supervisor does not restart the API for their sake."""
    return answers.Health()


@router.get("/livez", summary="This process lives, for its supervisor")
async def livez() -> answers.Health:
    """Needs no key."""
    return answers.Health()


@router.get("/ready", summary="The node can compute", responses=examples.REDIS_AWAY)
def ready(services: AppServices) -> answers.Ready:
    """200 when Redis answers and a worker is ready, else 503 with Retry-After."""
    models = sorted({worker.model for worker in services.workers.ready()})
    if not models:
        raise unavailable("No worker is ready: none is started yet, or they still load their model.")
    return answers.Ready(models=models)
