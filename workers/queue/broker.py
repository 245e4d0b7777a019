"""Celery's connection to Redis, changed so that a restart of Redis ends no worker."""

import logging
import time
from itertools import count
from queue import Empty
from typing import Any

from celery.app.amqp import AMQP
from kombu import Connection, Exchange, Queue
from kombu.transport import redis as kombu_redis
from kombu.transport.virtual.base import QoS
from redis import Redis
from redis.exceptions import ConnectionError, RedisError, ResponseError

from poc_core import queues
from poc_core.redis_at import connections
from poc_core.state.scripts import SharedScript

logger = logging.getLogger(__name__)

# Seconds between tries to reach Redis. Celery's own pause grows to 30 s, even if Redis is back.
_RECONNECT_S = 2.0
# Seconds between polls of a Redis that refuses commands, for example because its disk is full.
_REFUSED_S = 0.5

# Errors raised while an unexpected message is parsed.
_ODD = (AttributeError, ArithmeticError, KeyError, RecursionError, TypeError, ValueError)
_dropped = count(1)  # messages dropped by this process

# Seconds for which a worker's queue outlives the worker; without a limit the queues would pile up.
_QUEUE_OF_ONE_S = 3600


class _Client(Redis):
    """A Redis client with which kombu runs Lua scripts that the API has loaded into Redis."""

    def register_script(self, script: Any) -> Any:
        return SharedScript(self, script)


class RefusedError(ConnectionError, ResponseError):
    """A temporary refusal by Redis, raised as a connection error so that Celery tries again."""


class _OfWorker:
    """A mixin for Redis connections that raises a temporary refusal by Redis as RefusedError."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            if not connections.is_transient(error):
                raise
            raise RefusedError(str(error)) from error


class _Primary(_OfWorker, connections.PrimaryConnection):
    pass


class _PrimarySSL(_OfWorker, connections.PrimarySSLConnection):
    pass


class _Sentinel(_OfWorker, connections.SentinelConnection):
    pass


class _SentinelSSL(_OfWorker, connections.SentinelSSLConnection):
    pass


class _Channel(kombu_redis.Channel):
    """A kombu channel that survives the loss of its connection while tasks are running.

    kombu's own channel would end the worker with an AttributeError when a task then acknowledges
    its message. This channel leaves the message in Redis, which delivers it again; the new task
    finds no work left. This channel also reuses one client: a new client for every message, as in
    kombu, takes a fifth of a worker's CPU time for a batch.
    """

    connection_class: Any = _Primary
    connection_class_ssl: Any = _PrimarySSL

    _client_kept: Any = None

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (ArithmeticError, RecursionError, ValueError) as error:
            # kombu has taken the message off its queue, and would end the worker.
            _note_dropped("a queue", error)
            return True
        except ResponseError as error:
            if not connections.is_transient(error):
                raise
            # The error would end the worker, and Redis recovers sooner than an engine loads.
            time.sleep(_REFUSED_S)
            raise Empty from error

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        if self._is_abandoned:
            logger.info(
                "a task ended whose message came over a lost connection to Redis; the message will"
                " come again"
            )
            return
        try:
            super().basic_ack(delivery_tag, multiple)
        except RedisError as error:
            if not connections.is_transient(error):
                raise
            # Mark the message as done locally: otherwise it would count against the few
            # unacknowledged messages that a worker may have, as long as the connection lives.
            # The message stays in Redis, as above.
            logger.info("Redis does not remove an ended task's message now; it will come again")
            QoS.ack(self.qos, delivery_tag)

    def _do_restore_message(
        self, payload: Any, exchange: str, routing_key: str, *args: Any, **kwargs: Any
    ) -> None:
        # A dead worker's queue would never expire, and a live worker finds work without a message.
        if not str(routing_key).startswith(queues.worker_queue("")):
            super()._do_restore_message(payload, exchange, routing_key, *args, **kwargs)

    def _connparams(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_abandoned:
            # Celery handles this error.
            raise ConnectionError("this connection was abandoned when Redis became unavailable")
        return super()._connparams(*args, **kwargs)

    def _get_client(self) -> type[Redis]:
        return _Client

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:  # an asynchronous client owns the connection that it polls
            return super()._create_client(asynchronous=True)
        # A closed channel gets another pool.
        if self._client_kept is None or self._client_kept.connection_pool is not self.pool:
            self._client_kept = super()._create_client()
        return self._client_kept

    @property
    def _is_abandoned(self) -> bool:
        return self.connection is None or self.connection.client is None


class _SentinelChannel(_Channel, kombu_redis.SentinelChannel):
    from_transport_options: Any = (
        *kombu_redis.SentinelChannel.from_transport_options,
        "sentinels",
    )
    # set by kombu from these options
    master_name: str
    sentinels: tuple[tuple[str, int], ...]
    sentinel_kwargs: dict[str, Any]

    connection_class: Any = _Sentinel
    connection_class_ssl: Any = _SentinelSSL

    def _sentinel_managed_pool(self, asynchronous: bool = False) -> Any:
        given = self._connparams(asynchronous)
        for name in ("host", "port"):  # the first Sentinel's
            given.pop(name)
        pool = connections.sentinel_pool(
            self.master_name, self.sentinels, self.sentinel_kwargs, **given
        )
        # Stored where kombu finds the managers to close them.
        if asynchronous:
            self._async_sentinel_manager = pool.sentinel_manager
        else:
            self._sentinel_manager = pool.sentinel_manager
        return pool


class _Transport(kombu_redis.Transport):
    Channel = _Channel

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        try:
            super().register_with_event_loop(connection, loop)
        except RefusedError:
            time.sleep(_REFUSED_S)  # Celery retries immediately
            raise

    def _deliver(self, message: Any, queue: str) -> None:
        try:
            super()._deliver(message, queue)
        except _ODD as error:
            _note_dropped(queue, error)
            self._forget(message)

    def _forget(self, message: Any) -> None:
        """Acknowledges a message that could not be delivered, if kombu counts it as in progress."""
        try:
            tag = message["properties"]["delivery_tag"]
            for channel in self.channels:
                if tag in channel.qos._delivered:  # noqa: SLF001
                    channel.basic_ack(tag)
        except _ODD:
            return  # a message without a tag was not counted


class _SentinelTransport(_Transport, kombu_redis.SentinelTransport):
    Channel = _SentinelChannel


_STEADY = {
    kombu_redis.Transport: _Transport,
    kombu_redis.SentinelTransport: _SentinelTransport,
}


def _note_dropped(queue: str, error: Exception) -> None:
    n = next(_dropped)
    if n & (n - 1) == 0:  # a client that can send one can send millions
        logger.error(
            "dropped a message of %s that is none of Proofline's, the %d. so far: %r",
            queue,
            n,
            error,
        )


class SteadyConnection(Connection):
    def get_transport_cls(self) -> Any:
        transport = super().get_transport_cls()
        return _STEADY.get(transport, transport)

    def ensure_connection(self, *args: Any, **kwargs: Any) -> Any:
        return super().ensure_connection(*args, **{"interval_max": _RECONNECT_S, **kwargs})


def queue(name: str, **options: Any) -> Queue:
    """Returns the queue with this name, with the exchange and routing key that producers use."""
    return Queue(name, Exchange(name), routing_key=name, **options)


def queue_of_one(name: str) -> Queue:
    """Returns a single consumer's queue. The queue expires some time after the consumer's end."""
    return queue(name, expires=_QUEUE_OF_ONE_S)


class SteadyAMQP(AMQP):
    """Celery's AMQP class with this module's connections. Passed to Celery as `amqp=SteadyAMQP`."""

    Connection = SteadyConnection
