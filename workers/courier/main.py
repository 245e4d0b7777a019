"""The courier process: delivers what waits in the outboxes. Needs no engine and no GPU."""

from __future__ import annotations

import logging
import socket

import httpx

from poc_core.queues import CALLBACK_QUEUE
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.outbox import Outbox
from workers.courier.courier import TIMEOUT_S, Courier
from workers.courier.ticker import Ticker
from workers.queue.app import create_app

# Deliveries under way at the same time: receivers that hang must not hold up the others.
CONCURRENCY = 8


def run_courier(redis_url: str | None = None) -> None:
    """Delivers until SIGTERM or SIGINT. Several may run, also on several hosts."""
    for name in ("celery.worker.strategy", "celery.app.trace", "httpx"):  # lines that say nothing of failures
        logging.getLogger(name).setLevel(logging.WARNING)
    settings = load_settings(redis_url=redis_url)
    app = create_app(redis_url)
    outbox = Outbox(connect(settings), settings)
    # trust_env off: a proxy of the environment is for the internet, aggregators are on the operator's network.
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        courier = Courier(outbox, client, settings.callback_max_retries)
        courier.install()
        ticker = Ticker(outbox, app, courier)
        ticker.start()
        try:
            app.Worker(
                pool="threads",
                concurrency=CONCURRENCY,
                hostname=f"courier@{socket.gethostname()}",
                queues=[CALLBACK_QUEUE],
                loglevel="INFO",
                without_gossip=True,
                without_mingle=True,
            ).start()
        finally:
            ticker.stop()
