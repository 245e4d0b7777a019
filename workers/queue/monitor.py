"""`celery -A workers.queue.app flower`, with Flower's password for all that it serves.

Flower gives its metrics, which name models, workers and hosts, to anyone, and answers unknown
paths and methods itself. Here all get 401, but for /healthcheck, which says OK.
"""

import sys
from collections.abc import Callable
from typing import Any

from celery.__main__ import main
from flower.api import BaseApiHandler
from flower.urls import handlers, settings
from flower.views import BaseHandler
from flower.views.monitor import Healthcheck
from tornado.web import HTTPError, RequestHandler, StaticFileHandler


class LockedFiles(BaseHandler, StaticFileHandler):
    """Flower's stylesheets and scripts, behind the password."""


def lock() -> None:
    """Locks all handlers; to be called once, before Flower starts."""
    Healthcheck.prepare = RequestHandler.prepare
    for base in (BaseHandler, BaseApiHandler):
        base.prepare = _for_users(base.prepare)
    # Tornado adds its own handlers, for static files, /favicon.ico and /robots.txt.
    settings["static_handler_class"] = LockedFiles
    handlers[:] = [_locked(handler) for handler in handlers]


def _for_users(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
    """Asks for the password before every method, also before those a handler does not have."""

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
    lock()
    sys.argv[0] = "celery"
    main()
