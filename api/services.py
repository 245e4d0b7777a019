"""What the routes work with, made once per app."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request
from redis import Redis

from api.chat.chat_workers import ChatWorkers
from api.chat.gateway import Gateway
from api.edge.doorkeeper import Rates
from api.health.reading import HealthReader
from api.health.redis_watch import PATIENCE_S, RedisWatch
from api.models.cache import ModelCache
from api.models.downloads import Downloads
from api.node_metrics.fetch import fetch
from api.node_metrics.page import Node, Page
from api.proofs.dispatch import Dispatcher
from api.reading.live import Live
from api.reading.together import Together
from api.seen.chats import Chats
from api.seen.refusals import Refusals
from poc_core.gpus import GpuWatch
from poc_core.joining.invitations import Invitations
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

# Questions about hosts' tokens that one address may ask a second, with bursts of ten.
_TOKENS_PER_S = 1.0
# Large requests parsed and stored at once: 100,000 artifacts take 100 MB and a second.
_LARGE_BODIES = 1


class Waiting:
    """The places of requests that wait for their job's end; usable from any thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Takes a place, to be given back with `leave`; False: there is none."""
        with self._lock:
            if self.taken >= self.limit:
                return False
            self.taken += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self.taken -= 1


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
    waiting: Waiting
    node_metrics: Page
    model_cache: ModelCache = field(default_factory=ModelCache)
    token_rates: Rates = field(default_factory=lambda: Rates(_TOKENS_PER_S, time.monotonic))
    refusals: Refusals = field(default_factory=Refusals)
    live: Live = field(default_factory=Live)
    together: Together = field(default_factory=Together)
    large_chats: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_LARGE_BODIES))
    large_bodies: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_LARGE_BODIES))

    @classmethod
    def create(
        cls,
        settings: Settings,
        redis: Redis | None = None,
        dispatcher: Dispatcher | None = None,
        clock: Callable[[], float] = time.time,
    ) -> "Services":
        """The services for `settings`; tests bring their own Redis, dispatcher and clock."""
        watched = redis or connect(settings, patient=False, timeout_s=PATIENCE_S)
        redis = redis or connect(settings, patient=False)
        overviews = Overviews(redis, clock)
        workers = WorkerRegistry(redis, settings, clock)
        jobs = JobStore(redis, settings, clock)
        deployments = DeploymentStore(redis, settings, clock)
        chats = Chats()

        def node() -> Node:
            return Node(workers.live(), deployments.machines(), deployments.status())

        return cls(
            settings=settings,
            redis=redis,
            now=clock,
            jobs=jobs,
            workers=workers,
            rounds=RoundStore(redis, settings, clock),
            outbox=Outbox(redis, settings, clock),
            receivers=Receivers(redis, clock),
            overviews=overviews,
            health=HealthReader(overviews, RedisWatch(watched, clock), settings, clock),
            deployments=deployments,
            invitations=Invitations(redis, clock),
            downloads=Downloads(DownloadStore(redis, clock), settings),
            dispatcher=dispatcher or Dispatcher(settings, lambda job_id: jobs.any_active([job_id])),
            history=History(redis),
            events=Events(redis, clock),
            chats=chats,
            gateway=Gateway(
                ChatWorkers(workers, registry.CHAT_MEMORY_S, keeping=deployments.keeping), chats
            ),
            gpus=GpuWatch(settings.host),
            waiting=Waiting(settings.max_waiting_requests),
            node_metrics=Page(node, fetch),
        )

    def close(self) -> None:
        self.health.watch.close()
        self.downloads.close()
        self.dispatcher.close()
        self.redis.close()


async def _of_app(request: Request) -> Services:  # async: FastAPI runs what is not in a thread
    services: Services = request.app.state.services
    return services


AppServices = Annotated[Services, Depends(_of_app)]
