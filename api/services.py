"""The app's services, created once; each route names those that it uses."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from anyio import CapacityLimiter
from redis import Redis

from api.chat.chat_workers import ChatWorkers
from api.chat.gateway import Gateway
from api.console.view import View
from api.console.work import Work
from api.edge.doorkeeper import Rates
from api.health.reading import HealthReader
from api.health.redis_watch import PATIENCE_S, RedisWatch
from api.metrics import NodeMetrics
from api.models.cache import ModelCache
from api.models.deployments import Deploying
from api.models.downloads import Downloads
from api.node_metrics.fetch import fetch
from api.node_metrics.page import Node, Page
from api.proofs.admission import Admission
from api.proofs.dispatch import Dispatcher
from api.proofs.round_control import RoundControl
from api.proofs.waiting import InlineJobs
from api.reading.live import Live
from api.reading.together import Together
from api.seen.chats import Chats
from api.seen.refusals import Refusals
from api.version import VERSION
from poc_core.gpus import GpuWatch
from poc_core.joining.invitations import Invitations
from poc_core.periodic import Periodic
from poc_core.settings import Settings
from poc_core.state import (
    DeploymentStore,
    JobStore,
    Outbox,
    RoundStore,
    WorkerRegistry,
    connect,
    registry,
)
from poc_core.state.delivery.receivers import Receivers
from poc_core.state.downloads import DownloadStore
from poc_core.state.overview import Overviews
from poc_core.state.past.events import Events
from poc_core.state.past.history import History

# Requests a second to check hosts' tokens, for each address, with bursts of ten.
_TOKENS_PER_S = 1.0
# Large chats parsed at the same time.
_LARGE_CHATS = 1
# Seconds between two reports of this process's counters: less than a step of the history.
REPORT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Services:
    settings: Settings
    redis: Redis
    now: Callable[[], float]  # seconds since the epoch
    jobs: JobStore
    workers: WorkerRegistry
    rounds: RoundStore
    outbox: Outbox
    receivers: Receivers
    overviews: Overviews
    health: HealthReader
    deployments: DeploymentStore
    invitations: Invitations
    downloads: Downloads
    history: History
    events: Events
    chats: Chats
    dispatcher: Dispatcher
    gateway: Gateway
    gpus: GpuWatch
    inline: InlineJobs
    admission: Admission
    round_control: RoundControl
    deploying: Deploying
    node_metrics: Page
    metrics: NodeMetrics
    work: Work
    view: Callable[[], View]
    model_cache: ModelCache = field(default_factory=ModelCache)
    token_rates: Rates = field(default_factory=lambda: Rates(_TOKENS_PER_S, time.monotonic))
    refusals: Refusals = field(default_factory=Refusals)
    live: Live = field(default_factory=Live)
    together: Together = field(default_factory=Together)
    large_chats: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_LARGE_CHATS))

    @classmethod
    def create(
        cls,
        settings: Settings,
        redis: Redis | None = None,
        dispatcher: Dispatcher | None = None,
        clock: Callable[[], float] = time.time,
    ) -> "Services":
        """Creates the services for `settings`. Tests pass their own Redis, dispatcher and clock."""
        watched = redis or connect(settings, patient=False, timeout_s=PATIENCE_S)
        redis = redis or connect(settings, patient=False)
        overviews = Overviews(redis, clock)
        workers = WorkerRegistry(redis, settings, clock)
        jobs = JobStore(redis, settings, clock)
        deployments = DeploymentStore(redis, settings, clock)
        rounds, outbox = RoundStore(redis, settings, clock), Outbox(redis, settings, clock)
        dispatcher = dispatcher or Dispatcher(settings)
        inline = InlineJobs(settings, jobs, rounds)
        chats = Chats()
        health = HealthReader(overviews, RedisWatch(watched, clock), settings, clock)
        history, events = History(redis), Events(redis, clock)
        round_control = RoundControl(settings, workers, rounds, jobs, outbox, dispatcher)
        stats_of = round_control.stats_of
        work = Work(jobs, rounds, outbox, redis)

        def node() -> Node:
            return Node(workers.live(), deployments.machines(), deployments.status())

        return cls(
            settings=settings,
            redis=redis,
            now=clock,
            jobs=jobs,
            workers=workers,
            rounds=rounds,
            outbox=outbox,
            receivers=Receivers(redis, clock),
            overviews=overviews,
            health=health,
            deployments=deployments,
            invitations=Invitations(redis, clock),
            downloads=Downloads(DownloadStore(redis, clock), settings),
            dispatcher=dispatcher,
            history=history,
            events=events,
            chats=chats,
            gateway=Gateway(
                ChatWorkers(workers, registry.CHAT_MEMORY_S, keeping=deployments.keeping), chats
            ),
            gpus=GpuWatch(settings.host),
            inline=inline,
            admission=Admission(settings, jobs, workers, dispatcher, inline),
            round_control=round_control,
            deploying=Deploying(settings, deployments, rounds, jobs),
            node_metrics=Page(node, fetch),
            metrics=NodeMetrics(settings, health.read, jobs, outbox, workers, chats, stats_of),
            work=work,
            view=partial(View, settings, overviews, health, history, events, jobs, work, stats_of),
        )

    def reporting(self) -> Periodic:
        """Returns a thread that reports this process's counters to Redis each second and logs
        errors.
        """
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
