"""/api/v1/metrics, for the network's monitoring."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Response

from api.node_metrics.exposition import CONTENT_TYPE
from api.node_metrics.page import Page
from api.routes import deps, examples
from poc_core.errors import SettingsError

router = APIRouter(tags=["health"], responses=examples.REDIS_AWAY)

ThePage = Annotated[Page, deps.provided("node_metrics")]

# The environment variable that turns the route on or off, as the network names it.
VARIABLE = "GONKA_METRICS"


def is_on(environment: Mapping[str, str]) -> bool:
    """Returns whether GONKA_METRICS is `full` or unset, not `off`; else raises SettingsError."""
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
async def node_metrics(page: ThePage) -> Response:
    """Metrics of all ready engines and of the hosts' sensors.

    A silent engine is shown as last seen (mlnode_source_scrape_timestamp_seconds). 404 with
    GONKA_METRICS=off.
    """
    text = await page.text()
    return Response(text, headers={"content-type": CONTENT_TYPE})
