"""The courier process: delivers what waits in the outboxes. Needs no engine and no GPU."""

from __future__ import annotations

import logging
import socket

import httpx

from poc_core.queues import CALLBACK_QUEUE
from poc_core.settings import load_settings
from poc_core.state import WorkerRegistry
from poc_core.state.client import connect
from poc_core.state.delivery.outbox import Outbox
from poc_core.state.delivery.receivers import Receivers
from workers.courier.courier import Courier
from workers.courier.own_ports import OwnPorts
from workers.courier.poster import Poster
from workers.courier.ticker import Ticker
from workers.queue.app import create_app

# Celery's threads: a task only says to the courier's loop what is due.
CONCURRENCY = 2
# No limit on connections, which Places sets; none is kept, as another name's must not be taken for
# it.
_CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def run_courier(redis_url: str | None = None) -> None:
    """Delivers until SIGTERM or SIGINT. Several may run, also on several hosts."""
    for name in (
        "celery.worker.strategy",
        "celery.app.trace",
        "httpx",
    ):  # lines that say nothing of failures
        logging.getLogger(name).setLevel(logging.WARNING)
    settings = load_settings(redis_url=redis_url)
    app = create_app(redis_url, "courier")
    redis = connect(settings)
    outbox = Outbox(redis, settings)
    own_ports = OwnPorts(settings.own_ports, WorkerRegistry(redis, settings))
    # trust_env off: a proxy of the environment is for the internet, aggregators are on the
    # operator's network.
    client = httpx.AsyncClient(trust_env=False, limits=_CONNECTIONS)
    poster = Poster(client, settings.callbacks, own_ports.now)
    courier = Courier(
        outbox, Receivers(redis), poster, settings.callback_max_retries, settings.callback_max_bytes
    )
    courier.install()
    with courier.running():
        ticker = Ticker(outbox, app, courier, own_ports.look)
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
