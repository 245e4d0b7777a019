"""A Redis in this process, the stores on it, and the API in front of them."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import fakeredis
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from redis import Redis

from api.app import create_app
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.records import WorkerRecord
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import Clock, RecordingDispatcher, worker_record
from tests.harness.waiting import wait_until
from workers.engines.base import Engine
from workers.engines.options import EngineOptions


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Each test has an environment of its own, without settings from outside: commands that a test
    runs in this process change it.
    """
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("POC_")]:
        del os.environ[name]
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def settings() -> Settings:
    return some_settings()


@cache
def some_settings() -> Settings:
    """Nobody can change them, and a thousand of them take two seconds."""
    # A worker that beat once lives to the end of the test, however slow this machine is.
    return Settings(
        max_queued_nonces=1000,
        generate_chunk_timeout_sec=0.5,
        max_body_bytes=200_000,
        worker_ttl_s=120,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


class WaitingTime:
    """The time by which a request waits for its job: it passes where a test lets it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        return self._now

    def pass_by(self, seconds: float) -> None:
        """Returns when the request, which goes on waiting, has looked before and after."""
        wait_until(lambda: self._looks, "a look at the job")
        self._now += seconds
        seen = self._looks
        wait_until(lambda: self._looks >= seen + 2, "another look at the job")


@pytest.fixture
def waiting_time(monkeypatch: pytest.MonkeyPatch) -> WaitingTime:
    time = WaitingTime()
    monkeypatch.setattr("api.proofs.waiting.time", time)
    return time


@pytest.fixture
def server() -> fakeredis.FakeServer:
    """Redis' own side, which a test may take away."""
    return fakeredis.FakeServer()


@pytest.fixture
def redis(server: fakeredis.FakeServer) -> Iterator[Redis]:
    client = fakeredis.FakeRedis(server=server)
    yield client
    client.close()


@pytest.fixture
def jobs(redis: Redis, settings: Settings, clock: Clock) -> JobStore:
    return JobStore(redis, settings, clock)


@pytest.fixture
def workers(redis: Redis, settings: Settings, clock: Clock) -> WorkerRegistry:
    return WorkerRegistry(redis, settings, clock)


@pytest.fixture
def rounds(redis: Redis, settings: Settings, clock: Clock) -> RoundStore:
    return RoundStore(redis, settings, clock)


@pytest.fixture
def outbox(redis: Redis, settings: Settings, clock: Clock) -> Outbox:
    return Outbox(redis, settings, clock)


@pytest.fixture
def serve(workers: WorkerRegistry) -> Callable[..., WorkerRecord]:
    """Starts a worker, or lets its heart beat once more: serve("w1", max_seq_len=64)."""

    def beat(worker_id: str = "w1", **changes: object) -> WorkerRecord:
        record = worker_record(worker_id, **changes)  # type: ignore[arg-type]
        workers.heartbeat(record)
        return record

    return beat


@pytest.fixture
def a_worker(serve: Callable[..., WorkerRecord]) -> None:
    serve("w1")


@pytest.fixture
def dispatcher() -> RecordingDispatcher:
    return RecordingDispatcher()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's silence is no trouble of its health before a minute: real ones beat again."""
    monkeypatch.setattr("api.health.roster.SILENT_S", 60.0)


@pytest.fixture
def client(
    redis: Redis,
    settings: Settings,
    clock: Clock,
    jobs: JobStore,
    workers: WorkerRegistry,
    dispatcher: RecordingDispatcher,
    patient: None,
) -> Iterator[TestClient]:
    """The API on the same Redis as the other fixtures."""
    app = app_with_limit(settings.max_body_bytes)
    app.state.services = Services(settings, redis, cast(Dispatcher, dispatcher), clock)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@cache
def app_with_limit(max_body_bytes: int) -> FastAPI:
    """Its routes take longer to build than most tests take; what differs from test to test are
    its services.
    """
    return create_app(Settings(max_body_bytes=max_body_bytes))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Takes the engine that a command is to load; the engine's `options` are those it got."""

    def put(engine: Any) -> None:
        def load(options: EngineOptions) -> Engine:
            engine.options = options
            loaded: Engine = engine
            return loaded

        monkeypatch.setattr("lab.local_engine.load_engine", load)

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return put


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a proxy that does not answer, for all hosts."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
