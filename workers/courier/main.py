"""The courier process, which delivers the payloads of outboxes. It needs no engine and no GPU."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

import httpx
from redis.exceptions import RedisError

from poc_core.callback_tls import CallbackTls
from poc_core.open_files import raise_file_limit
from poc_core.serving.logs import log_to_stderr
from poc_core.settings import load_settings
from poc_core.state import WorkerRegistry, scripts
from poc_core.state.client import connect, refuse_wrong
from poc_core.state.delivery.outbox import BAD_CERTIFICATES, Outbox
from poc_core.state.delivery.receivers import Receivers
from workers.courier.courier import Courier
from workers.courier.node_ports import NodePorts
from workers.courier.poster import Poster
from workers.courier.ticker import Ticker
from workers.courier.tls_clients import CONNECTIONS

SCRIPTS_WAIT_S = 20.0  # less than supervisors wait for the courier to end


def run_courier(redis_url: str | None = None) -> None:
    """Delivers until SIGTERM or SIGINT. Several couriers may run, also on several hosts."""
    log_to_stderr()
    raise_file_limit()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = load_settings(redis_url=redis_url)
    refuse_wrong(settings)
    redis = connect(settings)
    outbox = Outbox(redis, settings)
    node_ports = NodePorts.of(settings, WorkerRegistry(redis, settings))
    # trust_env is off, because the environment's proxies are not meant for callbacks.
    client = httpx.AsyncClient(trust_env=False, limits=CONNECTIONS)
    tls = CallbackTls(settings.callback_tls)
    tls.problem()  # logs a problem before a callback needs the files
    proxy = settings.callback_proxy.get_secret_value() if settings.callback_proxy else None
    poster = Poster(client, settings.callbacks, node_ports.now, tls=tls, proxy=proxy)
    courier = Courier(
        outbox, Receivers(redis), poster, settings.callback_max_retries, settings.callback_max_bytes
    )
    with contextlib.suppress(RedisError):  # an API may be starting at the same time
        scripts.wait_until_loaded(redis, SCRIPTS_WAIT_S)
    with courier.running():

        def look() -> str:
            node_ports.look()
            return BAD_CERTIFICATES if tls.problem() else ""

        ticker = Ticker(outbox, courier, look)
        ticker.start()
        logging.getLogger(__name__).info("the courier delivers")
        stop.wait()
        ticker.stop()
