"""Why kombu's channel and connection are overridden, on a Redis in this process."""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any
from unittest.mock import Mock

import fakeredis
import pytest
from kombu import Connection, Producer
from kombu.exceptions import OperationalError
from kombu.transport import redis as kombu_redis
from redis.exceptions import (
    ConnectionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from poc_core.queues import EARLIER_TASKS, WORK_TASK
from workers.queue import broker
from workers.queue.app import create_app

URL = "redis://nowhere:6379/0"


def close_pool(channel: Any) -> None:
    """What kombu does with a channel that closes, or that could not reach Redis."""
    channel._disconnect_pools()


class Broker:
    """A Redis that can go away, and messages in it."""

    def __init__(self) -> None:
        self.server = fakeredis.FakeServer()
        self.redis = fakeredis.FakeRedis(server=self.server)

    def connect(self, connection_type: type[Connection] = broker.SteadyConnection) -> Connection:
        return connection_type(URL, transport_options={"visibility_timeout": 60})

    def message(self, connection: Connection, name: str = "jobs") -> Any:
        """A message that was published and fetched, to be acknowledged."""
        channel = connection.default_channel
        queue = broker.queue(name)(channel)
        queue.declare()
        Producer(channel).publish({"n": 1}, routing_key=name, exchange=name)
        return queue.get()

    def break_off(self, connection: Connection) -> None:
        """Redis goes away, Celery gives the connection up, its channel has closed its pool, and
        Redis is back.
        """
        channel = connection.default_channel
        self.server.connected = False
        connection.collect()
        close_pool(channel)
        self.server.connected = True

    @contextmanager
    def consumed(self, take: Callable[[Any], object]) -> Iterator[Any]:
        """The channel of a consumer that is given what comes to the queue "jobs"."""
        with self.connect() as connection:
            channel: Any = connection.default_channel
            queue = broker.queue("jobs")(channel)
            queue.declare()
            queue.consume("consumer", take)
            yield channel

    def unacknowledged(self) -> int:
        return int(self.redis.hlen("unacked"))


@pytest.fixture
def redis_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    found = Broker()

    class ToThisServer(fakeredis.FakeRedisConnection):
        def __init__(self, **options: Any) -> None:
            super().__init__(server=found.server, **options)

    for channel in (kombu_redis.Channel, broker._Channel):
        monkeypatch.setattr(channel, "connection_class", ToThisServer)
    yield found
    found.redis.close()


def test_the_workers_application_connects_so() -> None:
    connection = create_app(URL).connection_for_read()
    assert isinstance(connection, broker.SteadyConnection)


def test_a_message_that_was_worked_on_is_acknowledged(redis_broker: Broker) -> None:
    with redis_broker.connect() as connection:
        message = redis_broker.message(connection)
        assert redis_broker.unacknowledged() == 1
        message.ack()
    assert redis_broker.unacknowledged() == 0


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("rediss://redis:6379/0", {}),
        ("rediss://redis:6379/0?ssl_ca_certs=/ca.pem", {"ssl_ca_certs": "/ca.pem"}),
        ("rediss://redis:6379/0?ssl_cert_reqs=none", {"ssl_cert_reqs": "none"}),
    ],
)
def test_tls_takes_no_certificate_unseen_unless_told_to(url: str, given: dict[str, str]) -> None:
    """kombu by itself does, for a url that names no authority."""
    app = create_app(url)
    assert app.connection_for_read().ssl == {"ssl_cert_reqs": "required"} | given
    assert app.conf.broker_use_ssl == app.connection_for_read().ssl  # what Flower reads
    assert not create_app("redis://redis:6379/0").connection_for_read().ssl


def test_each_kind_of_consumer_has_its_own_messages_in_hand() -> None:
    options = [
        create_app(URL, consumer).conf.broker_transport_options
        for consumer in ("worker", "monitor")
    ]
    for name in ("unacked_key", "unacked_index_key", "unacked_mutex_key"):
        assert len({one[name] for one in options}) == 2
    for one in options:
        unacked = [value for name, value in one.items() if "unacked" in name]
        assert all(value.startswith("unacked.") for value in unacked)


class TestAConnectionThatIsGivenUp:
    """Celery collects a broken connection while tasks still have messages of it."""

    def test_leaves_its_messages_to_the_visibility_timeout(self, redis_broker: Broker) -> None:
        connection = redis_broker.connect()
        worked_on, given_back = (redis_broker.message(connection) for _ in range(2))
        redis_broker.break_off(connection)
        worked_on.ack()
        with pytest.raises(ConnectionError, match="abandoned"):  # which Celery knows
            given_back.requeue()
        assert redis_broker.unacknowledged() == 2

    @pytest.mark.parametrize("ending", ["ack", "requeue"])
    def test_is_what_kombus_own_cannot_cope_with(self, redis_broker: Broker, ending: str) -> None:
        """When it can, what overrides it may go."""
        connection = redis_broker.connect(Connection)
        message = redis_broker.message(connection)
        redis_broker.break_off(connection)
        with pytest.raises(AttributeError):
            getattr(message, ending)()

    def test_is_followed_by_one_that_works(self, redis_broker: Broker) -> None:
        first = redis_broker.connect()
        redis_broker.message(first)
        redis_broker.break_off(first)
        with redis_broker.connect() as second:
            redis_broker.message(second, "others").ack()
        assert redis_broker.unacknowledged() == 1


class TestARedisThatIsAway:
    def test_is_tried_every_two_seconds_until_it_is_back(
        self, redis_broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept: list[float] = []
        monkeypatch.setattr("kombu.utils.functional.sleep", slept.append)
        redis_broker.server.connected = False
        pauses: list[float] = []

        def tried(_error: Exception, pause_s: float) -> None:
            pauses.append(pause_s)
            redis_broker.server.connected = len(pauses) == 20

        with redis_broker.connect() as connection:
            connection.ensure_connection(tried, None)
            redis_broker.message(connection).ack()
        assert len(pauses) == 20
        assert max(pauses) <= 2.0
        assert sum(slept) <= 20 * 2.0

    def test_keeps_a_pause_that_the_caller_asks_for(
        self, redis_broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kombu.utils.functional.sleep", lambda _: None)
        redis_broker.server.connected = False
        pauses: list[float] = []
        connection = redis_broker.connect()
        with pytest.raises(OperationalError):
            connection.ensure_connection(
                lambda _error, pause_s: pauses.append(pause_s), max_retries=8, interval_max=5.0
            )
        assert max(pauses) > 2.0


def test_a_channel_keeps_one_client_for_all_that_it_does(redis_broker: Broker) -> None:
    with redis_broker.connect() as connection:
        channel = connection.default_channel
        with channel.conn_or_acquire() as first, channel.conn_or_acquire() as second:
            assert first is second
        assert channel.client is not first  # the one that polls owns its connection
        with connection.channel().conn_or_acquire() as other:
            assert other is not first


def test_a_channel_whose_pool_was_closed_takes_a_client_of_the_new_one(
    redis_broker: Broker,
) -> None:
    with redis_broker.connect() as connection:
        channel = connection.default_channel
        with channel.conn_or_acquire() as first:
            pass
        close_pool(channel)
        with channel.conn_or_acquire() as second:
            assert second is not first
            assert second.ping()


def test_a_queue_of_one_ends_an_hour_after_its_consumer_and_others_stay(
    redis_broker: Broker,
) -> None:
    with redis_broker.connect() as connection:
        for queue in (broker.queue("all"), broker.queue_of_one("one")):
            queue(connection.default_channel).declare()
            Producer(connection.default_channel).publish(
                {}, routing_key=queue.name, exchange=queue.name
            )
    assert redis_broker.redis.ttl("all") == -1
    assert 3590 <= int(redis_broker.redis.ttl("one")) <= 3600


@pytest.mark.parametrize(("name", "n"), [("poc.model.m", 1), ("poc.worker.host/gpu0-3fa9c1", 0)])
def test_a_message_that_a_dead_worker_had_comes_again_unless_it_was_for_this_worker_alone(
    redis_broker: Broker, name: str, n: int
) -> None:
    """Nobody would ever take it, and its queue's key has no TTL."""
    with redis_broker.connect() as connection:
        redis_broker.message(connection, name)
        channel: Any = connection.default_channel
        (tag,) = channel.qos._delivered
        channel.qos.restore_by_tag(tag)
    assert redis_broker.unacknowledged() == 0
    assert redis_broker.redis.llen(name) == n


def test_other_transports_are_kombus_own() -> None:
    with broker.SteadyConnection("memory://") as connection:
        assert type(connection.default_channel).__module__ == "kombu.transport.memory"


@pytest.mark.promise(
    "a compromised host", "cannot stop a process by writing unreadable records or messages"
)
@pytest.mark.parametrize(
    "odd",
    [
        *(b"no JSON", b"\xff", b"[" * 100_000, b"null", b"[]", b"{}", b'{"properties": null}'),
        b'{"properties": {"delivery_tag": "t", "body_encoding": "base64"}, "body": "x"}',
        b'{"properties": {"delivery_tag": []}, "body": "{}"}',
    ],
    ids=lambda odd: repr(odd[:60]),
)
def test_a_message_that_is_none_is_dropped_and_the_next_one_is_taken(
    redis_broker: Broker, odd: bytes
) -> None:
    taken: list[Any] = []
    with redis_broker.consumed(taken.append) as channel:
        redis_broker.redis.lpush("jobs", odd)
        Producer(channel).publish({"n": 1}, routing_key="jobs", exchange="jobs")
        for _ in range(2):
            read_one(channel, redis_broker.redis)
        assert [message.payload for message in taken] == [{"n": 1}]
        assert redis_broker.unacknowledged() == 1


def test_dropped_messages_are_counted_in_the_workers_log_which_does_not_grow_with_each(
    redis_broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker, "_dropped", itertools.count(1))
    with redis_broker.consumed(lambda _message: None) as channel:
        for _ in range(9):
            redis_broker.redis.lpush("jobs", b"no JSON")
            read_one(channel, redis_broker.redis)
    said = "\n".join(caplog.messages)
    assert re.findall(r"dropped a message of .*, the (\d+)\. so far", said) == ["1", "2", "4", "8"]


def test_a_message_that_celery_cannot_take_does_not_come_again(redis_broker: Broker) -> None:
    def takes_none(message: Any) -> None:
        raise TypeError(message)

    with redis_broker.consumed(takes_none) as channel:
        Producer(channel).publish({"n": 1}, routing_key="jobs", exchange="jobs")
        read_one(channel, redis_broker.redis)
        assert redis_broker.unacknowledged() == 0


class OneItem:
    """A client whose connection has an answer to BRPOP."""

    connection = None

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    def parse_response(self, *_: Any, **__: Any) -> tuple[bytes, bytes]:
        return b"jobs", self._redis.rpop("jobs")


def read_one(channel: Any, redis: Any) -> None:
    """What kombu does when Redis has answered BRPOP, which fakeredis has no socket for."""
    channel.__dict__["client"] = OneItem(redis)
    try:
        channel._brpop_read()
    finally:
        del channel.__dict__["client"]


@pytest.mark.parametrize(
    ("said", "raised"),
    [("MISCONF Errors writing to the AOF file", Empty), ("ERR unknown command", ResponseError)],
)
def test_a_redis_that_refuses_for_a_while_ends_no_worker(
    redis_broker: Broker, monkeypatch: pytest.MonkeyPatch, said: str, raised: type[Exception]
) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise ResponseError(said)

    monkeypatch.setattr(broker, "_REFUSED_S", 0.0)
    with redis_broker.connect() as connection:
        channel = connection.default_channel
        monkeypatch.setattr(channel.client, "parse_response", refuse)
        with pytest.raises(raised):
            channel._brpop_read()


@pytest.mark.parametrize("error", [OutOfMemoryError("used memory > 'maxmemory'"), TimeoutError()])
def test_a_message_that_redis_does_not_let_go_ends_no_worker_and_is_done_with_here(
    redis_broker: Broker, monkeypatch: pytest.MonkeyPatch, error: RedisError
) -> None:
    said = error

    def refuse(*_args: Any, **_options: Any) -> None:
        raise said

    with redis_broker.connect() as connection:
        channel = connection.default_channel
        channel.qos._delivered["tag"] = object()
        monkeypatch.setattr(channel.qos, "_remove_from_indices", lambda _tag: Mock(execute=refuse))
        channel.basic_ack("tag")
        channel.qos._flush()
        assert channel.qos._delivered == {}
        said = ResponseError("ERR unknown command")
        with pytest.raises(ResponseError):
            channel.basic_ack("tag")


def test_a_message_can_ask_for_the_tasks_of_workers_alone() -> None:
    """Whoever may write to the queues, such as a worker host gone bad."""
    for _ in range(2):  # tasks that are loaded before an application are its own from the start
        app = create_app(URL)
        app.loader.import_default_modules()
        assert set(app.tasks) == {WORK_TASK, *EARLIER_TASKS}
