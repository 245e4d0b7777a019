"""Runs `celery -A workers.queue.app flower`, and requires Flower's password for all pages. Without
this module, Flower needs no password for its metrics (with names of models, workers and hosts) and
for unknown paths. Only /healthcheck stays open, and returns OK.
"""

import sys
from collections.abc import Callable
from typing import Any

from celery.__main__ import main
from celery.events import EventReceiver
from flower import events
from flower.api import BaseApiHandler
from flower.urls import handlers, settings
from flower.utils import broker
from flower.views import BaseHandler
from flower.views.monitor import Healthcheck
from kombu import Connection
from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel
from tornado.web import HTTPError, RequestHandler, StaticFileHandler


class AllSentinels(broker.RedisSentinel):
    """Flower's reader of queue lengths. Tries all Sentinels, and uses the database in the URL."""

    def _get_redis_client(self, broker_options: Any, broker_use_ssl: Any) -> Redis:
        limits = {
            "socket_timeout": self.socket_timeout,
            "socket_connect_timeout": self.socket_connect_timeout,
        }
        tls = {"ssl": True, **broker_use_ssl} if broker_use_ssl else {}
        found = Sentinel(
            broker_options["sentinels"],
            sentinel_kwargs={**limits, **broker_options["sentinel_kwargs"]},
            db=self.vhost,
            username=self.username,
            password=self.password,
            **limits,
            **tls,
        )
        client: Redis = found.master_for(self.master_name)
        return client


class SteadyReceiver(EventReceiver):
    """Flower's receiver of events. Retries at least every 10 s while Redis is unavailable. Flower
    itself doubles the time between two attempts without a limit.
    """

    def __init__(self, connection: Connection, **named: Any) -> None:
        connection.ensure_connection(_report, interval_max=10)
        super().__init__(connection, **named)


def _report(error: Exception, interval_s: float) -> None:
    events.logger.warning(
        "Redis does not answer (%s), trying again in %d seconds", error, interval_s
    )


class LockedFiles(BaseHandler, StaticFileHandler):
    """A handler that serves Flower's stylesheets and scripts only with the password."""


def lock() -> None:
    """Makes Flower's handlers require the password. Must be called once, before Flower starts."""
    Healthcheck.prepare = RequestHandler.prepare
    for base in (BaseHandler, BaseApiHandler):
        base.prepare = _for_users(base.prepare)
    # Tornado adds handlers for static files, /favicon.ico and /robots.txt.
    settings["static_handler_class"] = LockedFiles
    handlers[:] = [_locked(handler) for handler in handlers]


def _for_users(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps a handler's `prepare` to answer 401 without the password, whatever the HTTP method."""

    def prepare_for_users(handler: Any) -> None:
        if not handler.get_current_user():
            raise HTTPError(401)
        prepare(handler)

    return prepare_for_users


def _locked(handler: Any) -> Any:
    if isinstance(handler, tuple) and handler[1] is StaticFileHandler:
        return (handler[0], LockedFiles, *handler[2:])
    return handler


if __name__ == "__main__":
    broker.RedisSentinel = AllSentinels
    events.EventReceiver = SteadyReceiver
    lock()
    sys.argv[0] = "celery"
    main()
