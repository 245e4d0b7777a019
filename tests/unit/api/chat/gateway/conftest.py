"""The OpenAI gateway over real sockets, before workers that answer, refuse or die."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import fakeredis
import httpx
import pytest
from fastapi import FastAPI

from api.app import create_app
from api.chat.chat_workers import ChatWorkers
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.settings import Settings
from poc_core.state import registry
from tests.harness.gateway import MAX_BODY_BYTES, Node, Start
from tests.harness.samples import MODEL, RecordingDispatcher
from tests.harness.waiting import wait_until
from tests.peers.fake_worker import Behaviour, FakeWorker
from tests.stacks.served import served, url_of


@pytest.fixture(scope="module")
def app() -> FastAPI:
    settings = Settings(max_body_bytes=MAX_BODY_BYTES, worker_ttl_s=120)
    services = Services(settings, fakeredis.FakeRedis(), cast(Dispatcher, RecordingDispatcher()))
    return create_app(services=services)


@pytest.fixture(autouse=True)
def services(app: FastAPI) -> Services:
    """The services of the API, which know of no worker yet."""
    services: Services = app.state.services
    # A client has its answer before the API has timed it.
    wait_until(lambda: not services.chats._active, "the end of earlier tests' requests")  # noqa: SLF001
    services.redis.flushall()
    for histogram in (services.chats.first_token, services.chats.whole):
        histogram.clear()
    services.gateway.workers = ChatWorkers(services.workers, registry.CHAT_MEMORY_S)
    return services


@pytest.fixture(scope="module")
def api(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of the API on a real server: an in-process one would not see clients hang up."""
    with (
        served(app) as server,
        httpx.Client(base_url=url_of(server), timeout=60, trust_env=False) as client,
    ):
        yield client


@pytest.fixture
def start(services: Services) -> Iterator[Start]:
    """Starts and registers a worker: start("w1", behaviour, model=..., stats=...)."""
    with contextlib.ExitStack() as stack:

        def start(
            worker_id: str, behaviour: Behaviour, model: str = MODEL, **stats: Any
        ) -> FakeWorker:
            worker = stack.enter_context(FakeWorker(worker_id, behaviour, model))
            services.workers.heartbeat(replace(worker.record, stats=stats))
            return worker

        yield start


@pytest.fixture
def node(api: httpx.Client, services: Services, start: Start) -> Node:
    return Node(api, services, start)
