"""/api/v1/metrics: metrics for the network's monitoring."""

from collections.abc import Mapping

from fastapi import APIRouter, Response

from api.node_metrics.exposition import CONTENT_TYPE
from api.routes import examples
from api.routes.services import AppServices
from poc_core.errors import SettingsError

router = APIRouter(tags=["health"], responses=examples.REDIS_AWAY)

# The environment variable that turns the route on or off, as the network names it.
VARIABLE = "GONKA_METRICS"


def is_on(environment: Mapping[str, str]) -> bool:
    """Returns True if GONKA_METRICS is `full` or unset, False if `off`. May raise SettingsError."""
    chosen = environment.get(VARIABLE, "").strip().lower() or "full"
    if chosen not in ("full", "off"):
        raise SettingsError(f"{VARIABLE}: must be full or off, not {chosen!r}.")
    return chosen == "full"


@router.get(
    "/api/v1/metrics",
    summary="Read metrics of engines, GPUs and hosts (network's schema v1)",
    response_class=Response,
    responses={
        200: {
            "content": {"text/plain": {}},
            "description": "Schema v1: Prometheus' text format 0.0.4, at most 5,000 series, 2 MiB.",
        },
    },
)
async def node_metrics(services: AppServices) -> Response:
    """Returns metrics of all ready engines and of the hosts' sensors.

    For a silent engine, returns its last metrics (mlnode_source_scrape_timestamp_seconds has their
    time). 404 if GONKA_METRICS=off.
    """
    text = await services.node_metrics.text()
    return Response(text, headers={"content-type": CONTENT_TYPE})
