"""Creates the services of the app, which its routes use."""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request
from redis import Redis

from api.chat.chat_workers import ChatWorkers
from api.chat.chats import Chats
from api.chat.gateway import Gateway
from api.console.live import Live
from api.console.view import View
from api.console.work import Work
from api.edge.doorkeeper import Rates
from api.edge.refusals import Refusals
from api.health.metrics import NodeMetrics
from api.health.reading import HealthReader
from api.health.redis_watch import PATIENCE_S, RedisWatch
from api.models.cache import ModelCache
from api.models.deployments import Deploying
from api.models.downloads import Downloads
from api.node_metrics.fetch import fetch
from api.node_metrics.page import Node, Page
from api.proofs.admission import Admission
from api.proofs.dispatch import Dispatcher
from api.proofs.round_control import RoundControl
from api.proofs.waiting import InlineJobs
from api.routes.together import Together
from api.version import VERSION
from poc_core.gpus import GpuWatch
from poc_core.joining.invitations import Invitations
from poc_core.periodic import Periodic
from poc_core.settings import Settings
from poc_core.state.client import connect
from poc_core.state.deployments import DeploymentStore
from poc_core.state.downloads import DownloadStore
from poc_core.state.events import Events
from poc_core.state.history import History
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox
from poc_core.state.overview import Overviews
from poc_core.state.registry import CHAT_MEMORY_S, WorkerRegistry
from poc_core.state.rounds import RoundStore

# Requests with a host's token that one address can send per second, with bursts of ten.
_TOKENS_PER_S = 1.0
# Most large chat requests parsed at the same time.
_LARGE_CHATS = 1
# Seconds between two reports of this process's counters: less than a step of the history.
REPORT_S = 1.0


class Services:
    """The services of one app. Tests pass their own Redis, dispatcher and clock."""

    def __init__(
        self,
        settings: Settings,
        redis: Redis | None = None,
        dispatcher: Dispatcher | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        watched = redis or connect(settings, patient=False, timeout_s=PATIENCE_S)
        self.redis = redis = redis or connect(settings, patient=False)
        self.settings = settings
        self.now = clock  # seconds since the epoch
        self.jobs = jobs = JobStore(redis, settings, clock)
        self.workers = workers = WorkerRegistry(redis, settings, clock)
        self.rounds = rounds = RoundStore(redis, settings, clock)
        self.outbox = outbox = Outbox(redis, settings, clock)
        self.overviews = overviews = Overviews(redis, clock)
        self.health = health = HealthReader(overviews, RedisWatch(watched, clock), settings, clock)
        self.deployments = deployments = DeploymentStore(redis, settings, clock)
        self.invitations = Invitations(redis, clock)
        self.downloads = Downloads(DownloadStore(redis, clock), settings)
        self.history = history = History(redis)
        self.events = events = Events(redis, clock)
        self.chats = chats = Chats()
        self.dispatcher = dispatcher = dispatcher or Dispatcher(settings)
        chat_workers = ChatWorkers(workers, CHAT_MEMORY_S, keeping=deployments.keeping)
        self.gateway = Gateway(chat_workers, chats)
        self.gpus = GpuWatch(settings.host)
        self.inline = inline = InlineJobs(settings, jobs, rounds, workers)
        self.admission = Admission(settings, jobs, workers, dispatcher, inline, deployments.keeping)
        self.round_control = RoundControl(
            settings, workers, rounds, jobs, outbox, dispatcher, deployments.keeping
        )
        self.deploying = Deploying(settings, deployments, rounds, jobs)
        self.node_metrics = Page(
            lambda: Node(workers.live(), deployments.machines(), deployments.status()), fetch
        )
        stats_of = self.round_control.stats_of
        self.metrics = NodeMetrics(settings, health.read, jobs, outbox, workers, chats, stats_of)
        self.work = work = Work(jobs, rounds, outbox, redis)
        self.view = partial(
            View, settings, overviews, health, history, events, jobs, work, stats_of
        )
        self.model_cache = ModelCache()
        self.token_rates = Rates(_TOKENS_PER_S, time.monotonic)
        self.refusals = Refusals()
        self.live = Live()
        self.together = Together()
        self.large_chats = CapacityLimiter(_LARGE_CHATS)

    def reporting(self) -> Periodic:
        """Returns a thread that reports this process's counters to Redis each second."""
        started = [f"The API {VERSION} has started on {self.settings.host}."]
        told_addresses_at = float("-inf")

        def report() -> None:
            nonlocal told_addresses_at
            while started:
                self.events.note("node", started[0])
                started.pop(0)
            if self.now() - told_addresses_at >= self.settings.worker_ttl_s:
                self.workers.store_api_addresses()
                told_addresses_at = self.now()
            self.chats.report(self.history, self.now())
            self.refusals.report(self.events)

        return Periodic("reporting", REPORT_S, report)

    def close(self) -> None:
        self.health.watch.close()
        self.downloads.close()
        self.dispatcher.close()
        self.redis.close()


async def _of_app(request: Request) -> Services:  # async: otherwise FastAPI would use a thread
    services: Services = request.app.state.services
    return services


# The type of a route's parameter that is the app's Services.
AppServices = Annotated[Services, Depends(_of_app)]
