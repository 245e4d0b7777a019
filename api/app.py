"""The FastAPI application. Run it with `uvicorn --factory api.app:create_app`."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from api import errors
from api.bodies import batch_bodies, job_bodies, round_bodies
from api.edge import doorkeeper
from api.edge.body_limit import BodyLimit
from api.edge.encodings import Decoded
from api.edge.head import HeadAsGet
from api.edge.perimeter import Perimeter
from api.edge.refusals import Watch
from api.edge.shares import InTurns
from api.edge.version_segment import VersionSegment
from api.error_shapes import ErrorShapes
from api.models.downloads import LOOK_S
from api.routes import (
    aggregator,
    console,
    gpus,
    health,
    hosts,
    models,
    node,
    node_metrics,
    openai,
    pow,
    reference,
    rounds,
    validate,
)
from api.routes.services import REPORT_S, Services
from api.version import VERSION
from poc_core.settings import Settings, listed, load_settings

_DESCRIPTION = """\
A Proof-of-Compute node for the Gonka network: jobs and rounds of proofs, and OpenAI-compatible
chat on the same engines.

Errors are `{"detail": ...}`: a sentence, an object or a list. Below `/v1` they have OpenAI's form,
below `/v1/messages` Anthropic's. 429 and 503 have `Retry-After`.
"""


def create_app(
    settings: Settings | None = None,
    services: Services | None = None,
    listens_on: str = "127.0.0.1",
) -> FastAPI:
    """Creates the API. `listens_on`: the address or name that the server listens on."""
    settings = settings or (services.settings if services else load_settings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        looks = app.state.services.downloads.looks()
        looks.start()
        reports = app.state.services.reporting()
        reports.start()
        app.state.services.health.watch.start()
        yield
        looks.stop(LOOK_S)
        reports.stop(REPORT_S)
        app.state.services.node_metrics.close()
        await app.state.services.gateway.close()
        app.state.services.close()

    app = FastAPI(
        title="Proofline",
        version=VERSION,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load external scripts; routes/console.py serves ours
        redoc_url=None,
    )
    app.state.services = services or Services(settings)
    app.state.salts_caches = doorkeeper.salts_wanted(settings, listens_on)
    # Added from the innermost to the outermost, so the last one added sees a request first.
    # VersionSegment changes the path before Doorkeeper matches a route.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Decoded, max_bytes=settings.max_body_bytes)
    app.add_middleware(InTurns)
    app.add_middleware(
        doorkeeper.Doorkeeper,
        settings=settings,
        wants_keys=doorkeeper.keys_wanted(settings, listens_on),
        routes=app.router.routes,
    )
    app.add_middleware(
        Perimeter, settings=settings, own_names=(listens_on, settings.host, socket.gethostname())
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=listed(settings.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "x-api-key", "api-key", "content-type"],
        )
    app.add_middleware(ErrorShapes)
    app.add_middleware(Watch)
    app.add_middleware(HeadAsGet)
    # outermost: all other layers see the path without its version
    app.add_middleware(VersionSegment)
    errors.install(app)
    # The routers' routes are added directly: include_router would build each route again (70 ms).
    for module in (health, pow, rounds, validate, aggregator, node, gpus, hosts, models, openai):
        app.routes.extend(module.router.routes)
    app.routes.extend(pow.of_aggregators.routes)
    if node_metrics.is_on(os.environ):
        app.routes.extend(node_metrics.router.routes)
    app.routes.extend(console.router.routes)
    reference.describe(
        app,
        [*job_bodies().values(), *round_bodies().values(), *batch_bodies().values()],
        doorkeeper.OPEN,
    )
    return app
