"""`celery -A workers.queue.app flower`, with Flower's password for its metrics too, which Flower gives to anyone.

They tell the names of models, workers and hosts. What is left open, /healthcheck, says OK.
"""

import sys
from typing import Any

from celery.__main__ import main
from flower.views.monitor import Metrics
from tornado.web import authenticated


def lock_metrics(handler: Any = Metrics) -> None:
    handler.get = authenticated(handler.get)


if __name__ == "__main__":
    lock_metrics()
    sys.argv[0] = "celery"
    main()
