"""Another server becomes the primary: clients, scripts and messages find it, and doctor tells."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from redis import Redis
from redis.exceptions import ConnectionError, NoPermissionError, RedisError

from api.health.redis_watch import RedisWatch
from cli.examine.findings import Finding
from cli.examine.redis import server
from cli.supervise.redis_server import RedisServerError, free_port, wait_for_redis
from poc_core.errors import ProoflineError
from poc_core.settings import Settings
from poc_core.state import scripts
from poc_core.state.client import connect, refuse_wrong
from tests.harness.waiting import wait_until
from tests.stacks.sentinels import (
    ASKER,
    HOST,
    MASTER,
    PASSWORD,
    READY_S,
    Sentinels,
    Server,
    redis_server,
    sentinels,
)
from workers.queue.app import create_app
from workers.queue.broker import queue

pytestmark = pytest.mark.integration

NAME = "redis.moves.test"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Server]]:
    """A primary and its replica, which nobody watches."""
    first = redis_server(tmp_path / "first", free_port())
    follows = f"replicaof {HOST} {first.port}"
    servers = [first, redis_server(tmp_path / "second", free_port(), [follows])]
    try:
        for one in servers:
            one.start()
        wait_until(lambda: all(one.answers() for one in servers), "servers", READY_S)
        yield servers
    finally:
        for one in servers:
            one.stop()


class Resolver:
    """The DNS, where NAME is one server and then another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = 0
        ask = socket.getaddrinfo

        def answer(host: Any, port: Any, *args: Any, **options: Any) -> Any:
            if host == NAME:
                host, port = HOST, self.port
            return ask(host, port, *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", answer)


def change_places(first: Server, second: Server) -> None:
    """By hand, and nobody is cut off."""
    with first.client() as client, second.client() as other:
        assert client.wait(1, int(READY_S * 1000)) == 1
        other.replicaof("NO", "ONE")
        client.replicaof(HOST, second.port)


def test_one_name_that_moves_is_asked_for_anew(
    two: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    resolver = Resolver(monkeypatch)
    resolver.port = first.port
    settings = Settings(redis_url=f"redis://:{PASSWORD.replace(' ', '%20')}@{NAME}:6379/0")
    app = create_app(settings.redis_url)
    with (
        connect(settings) as client,
        app.connection_for_write() as producing,
        app.connection_for_read() as consuming,
        second.client() as there,
    ):
        waiting = Waiting(consuming)
        publish(producing, "one")
        wait_until(lambda: waiting.taken == ["one"], "the first message", READY_S)

        resolver.port = second.port
        change_places(first, second)
        client.set("after", 1)  # READONLY, and on to the other one
        assert there.get("after") == b"1"
        wait_until(lambda: waiting.ended, "who waits for messages is told", READY_S)
        publish(producing, "two")
        assert there.llen("jobs") == 1


class Waiting:
    """Who takes messages off a queue, in a thread, until its connection is of no more use."""

    def __init__(self, connection: Connection) -> None:
        self.taken: list[str] = []
        self.ended = False
        self._connection = connection
        self._consumer = connection.Consumer([queue("jobs")], callbacks=[self._take])
        self._consumer.consume()
        threading.Thread(target=self._run, daemon=True).start()

    def _take(self, body: str, message: Any) -> None:
        message.ack()
        self.taken.append(body)

    def _run(self) -> None:
        errors = self._connection.connection_errors  # Celery lives with these, not with others
        with contextlib.suppress(*errors):
            while True:
                with contextlib.suppress(TimeoutError):
                    self._connection.drain_events(timeout=1)
        self.ended = True


def publish(connection: Connection, what: str) -> None:
    producer = connection.Producer()
    connection.ensure(producer, producer.publish, max_retries=3)(
        what, routing_key="jobs", exchange="jobs", declare=[queue("jobs")]
    )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    """A primary, a replica and one Sentinel, which decides alone."""
    folder = tmp_path_factory.mktemp("watched")
    with sentinels(folder, 2, 1, own=(), sentinel_own=[ASKER]) as running:
        yield running


def levels(findings: Iterator[Finding]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in findings:
        found.setdefault(finding.level, []).append(finding.says)
    return found


@pytest.fixture
def no_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with other work answers late, and that is no fault of its Redis."""
    monkeypatch.setattr("cli.examine.redis._SLOW_MS", math.inf)


def test_doctor_tells_of_sentinels_and_replicas(watched: Sentinels, no_slowness: None) -> None:
    told = levels(server(Settings(redis_url=watched.url)))
    assert "problem" not in told
    few, forgets = told["warning"]
    primary = watched.primary
    assert f"{HOST}:{primary.port} is the primary of proofline (quorum 1 of 1)" in few
    assert "min-replicas-to-write is 0" in forgets
    assert "1 replica(s) keep up" in told["ok"]
    (other,) = (server for server in watched.servers if server is not primary)
    of_a_replica = f"redis://:{PASSWORD}@{HOST}:{other.port}/0"
    (replica,) = levels(server(Settings(redis_url=of_a_replica)))["problem"]
    assert replica == "It is a replica and takes no writes."


@pytest.mark.promise(
    "a process with a Sentinel user",
    "can ask which server is the primary, but cannot change the primary",
)
def test_a_user_of_the_sentinels_asks_for_the_primary_and_names_none(watched: Sentinels) -> None:
    of_asker = "sentinel_username=asker&sentinel_password=of-the-asker"
    with connect(Settings(redis_url=watched.url_of("", PASSWORD, of_asker))) as node:
        assert node.ping()
    wanted = ["FAILOVER {}", "REMOVE {}", "SET {} quorum 9", "RESET *", "MONITOR mine {} 1 1"]
    wanted += ["CONFIG SET announce-port 1", "FLUSHCONFIG"]
    name, password = "asker", "of-the-asker"
    (port,) = (server.port for server in watched.sentinels)
    with Redis(host=HOST, port=port, username=name, password=password) as asker:
        for words in wanted:
            with pytest.raises(NoPermissionError):
                asker.execute_command("SENTINEL", *words.format(MASTER).split())


def cluster_port() -> int:
    """A free port; so is that + 10,000, where a node of a cluster listens, too."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError), socket.socket() as other:
            other.bind((HOST, port + 10_000))
            return port


@pytest.mark.promise("a Redis server that is not the primary", "gets no work")
def test_what_will_not_do_is_refused_at_the_start(watched: Sentinels, tmp_path: Path) -> None:
    cluster = redis_server(tmp_path / "cluster", cluster_port(), ["cluster-enabled yes"])
    cluster.start()
    urls = {
        f"redis://:{PASSWORD}@{HOST}:{cluster.port}/0": "is a Redis Cluster, which would spread",
        watched.url.replace("/proofline/", "/other/"): "know no master other .*proofline",
    }
    try:
        wait_until(cluster.answers, "the cluster's server", READY_S)
        for url, says in urls.items():
            settings = Settings(redis_url=url)
            with pytest.raises(ProoflineError, match=says):
                refuse_wrong(settings)
            with pytest.raises(RedisServerError, match=says):
                wait_for_redis(url)
            assert levels(server(settings))["problem"] != []
    finally:
        cluster.stop()
    # One that is away may come yet, and whoever waits for it says why.
    away = f"redis+sentinel://{HOST}:{free_port()}/proofline/0"
    refuse_wrong(Settings(redis_url=away))
    with pytest.raises(RedisServerError, match=r"no Sentinel answers .*Connection refused"):
        wait_for_redis(away, timeout_s=0)


@pytest.mark.promise("a Redis server that is not the primary", "gets no work")
def test_after_a_failover_work_goes_on_at_the_new_primary(watched: Sentinels) -> None:
    settings = Settings(redis_url=watched.url)
    app = create_app(watched.url)
    with (
        connect(settings) as client,
        connect(settings, patient=False) as of_api,
        app.connection_for_write() as producing,
    ):
        watch = RedisWatch(of_api, time.time)
        watch.look()
        publish(producing, "one")
        client.set("before", 1)
        assert client.wait(1, int(READY_S * 1000)) == 1
        killed = watched.kill_primary()

        def is_back(redis: Redis) -> bool:
            with contextlib.suppress(RedisError):
                return bool(redis.set("after", 1))
            return False

        wait_until(lambda: is_back(client), "a new primary", READY_S)
        assert client.get("before") == b"1"
        known = scripts.load(client, "count_jobs")
        client.script_flush()  # as Redis 7 and newer, whose replicas get no scripts
        watch.look()
        assert client.script_exists(known.sha) == [True]
        publish(producing, "two")
        assert client.llen("jobs") == 2
    with (
        pytest.raises(ConnectionError, match="Connection refused"),
        killed.client() as gone,
    ):
        gone.ping()
