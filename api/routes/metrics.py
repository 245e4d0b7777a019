"""/metrics, for Prometheus."""

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from api.metrics import NodeMetrics
from api.schema import examples
from api.services import AppServices

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    summary="Read metrics for Prometheus",
    response_class=Response,
    responses={
        200: {
            "content": {"text/plain": {}, "application/openmetrics-text": {}},
            "description": "Prometheus' text format, or OpenMetrics if asked for.",
        },
        **examples.REDIS_AWAY,
    },
)
def metrics(request: Request, services: AppServices) -> Response:
    """Round, outbox, jobs, workers and chat of the complete node, from any API process."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(NodeMetrics(services)), headers={"content-type": content_type})
