"""Redis behind TLS, with a real certificate: nobody takes another's certificate for it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from kombu.exceptions import OperationalError

from bench.faults.campaign import run
from poc_core.settings import load_settings
from poc_core.state.client import connect
from tests.stacks.tls_redis import TlsRedis, make_certificate, tls_redis
from workers.queue.app import create_app

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRedis]:
    with tls_redis(tmp_path_factory.mktemp("tls")) as server:
        yield server


def by_redis_py(url: str) -> None:
    """As API, workers and courier ask for jobs and rounds."""
    with connect(load_settings(redis_url=url)) as client:
        client.ping()


def by_celery(url: str) -> None:
    """As API, workers, courier and Flower reach their queues."""
    with create_app(url) as app, app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0)
        connection.default_channel.client.ping()


CLIENTS = pytest.mark.parametrize("client", [by_redis_py, by_celery])
Client = Callable[[str], None]
REFUSED = (redis.ConnectionError, OperationalError)


@CLIENTS
def test_who_trusts_the_certificate_is_let_in(server: TlsRedis, client: Client) -> None:
    client(server.trusting_url)


@CLIENTS
def test_a_url_without_an_authority_does_not_take_any_certificate(
    server: TlsRedis, client: Client
) -> None:
    with pytest.raises(REFUSED, match="certificate verify failed"):
        client(server.url)


@CLIENTS
def test_another_authority_is_not_enough(server: TlsRedis, client: Client, tmp_path: Path) -> None:
    other, _ = make_certificate(tmp_path, "other")
    with pytest.raises(REFUSED, match="certificate verify failed"):
        client(f"{server.url}?ssl_ca_certs={other}")


@CLIENTS
def test_the_certificate_must_be_for_this_host(server: TlsRedis, client: Client) -> None:
    with pytest.raises(REFUSED, match="certificate verify failed: Hostname mismatch"):
        client(server.trusting_url.replace("127.0.0.1", "localhost"))


@CLIENTS
def test_without_tls_nothing_is_said(server: TlsRedis, client: Client) -> None:
    with pytest.raises(REFUSED):
        client(server.url.replace("rediss://", "redis://"))


@pytest.mark.slow
def test_a_minute_of_work_by_tls_everywhere_loses_and_doubles_nothing() -> None:
    """Jobs, rounds and chat of two real engines; callbacks and clients by mutual TLS."""
    report = run(1.0, seed=1, engine="vllm", faults=[], pause_s=0, log=print, tls=True)
    assert report.problems == []
    for what in ("jobs accepted", "rounds", "nonces of rounds", "chat 200"):
        assert report.counts[what] > 0
