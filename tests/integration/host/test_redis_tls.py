"""Redis behind TLS, with a real certificate: the whole node over it, and nobody takes another's
certificate for it.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis
from kombu.exceptions import OperationalError

from bench.faults.campaign import run
from cli.supervise.processes import command_of_proofline
from cli.supervise.redis_server import free_port
from poc_core.settings import load_settings
from poc_core.state.client import connect
from tests.harness.waiting import wait_until
from tests.integration.node import run_node, synthetic_artifacts
from tests.peers.receiver import Receiver
from tests.stacks.round_client import FAST, round_body
from tests.stacks.tls_redis import TlsRedis, make_certificate, tls_redis
from tests.stacks.up import environment
from workers.queue.app import create_app

pytestmark = pytest.mark.integration

READY_S = 120.0


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
def test_a_whole_node_over_it(server: TlsRedis) -> None:
    """A job, a round with its callbacks, and Flower."""
    with ExitStack() as exits:
        node = run_node(
            exits, workers=1, synthetic_step_ms=5, env=FAST, redis_url=server.trusting_url
        )
        receiver = exits.enter_context(Receiver())
        port = free_port()
        flower = subprocess.Popen(
            command_of_proofline("flower", "--port", str(port)),
            env=environment(
                {"POC_REDIS_URL": server.trusting_url, "FLOWER_BASIC_AUTH": "me:a password"}
            )
            | {"PATH": os.environ["PATH"]},
        )
        exits.callback(flower.wait, 30)
        exits.callback(flower.terminate)

        job = node.result(node.submit(range(64)))
        assert job["artifacts"] == synthetic_artifacts(range(64))

        assert (
            node.http.post("/api/v1/pow/init/generate", json=round_body(receiver)).status_code
            == 200
        )
        wait_until(receiver.nonces, "callbacks", READY_S)
        assert node.stop().status_code == 200
        wait_until(
            lambda: node.status()["stats"]["artifacts_waiting"] == 0,
            "what the round had computed",
            READY_S,
        )
        assert (
            len(set(receiver.nonces()))
            == len(receiver.nonces())
            == node.status()["stats"]["total_processed"]
        )

        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", auth=("me", "a password"), trust_env=False
        ) as http:

            def queues() -> list[str]:
                try:
                    found = http.get("/api/workers", params={"refresh": "1"}).json().values()
                    return sorted(
                        queue["name"] for said in found for queue in said.get("active_queues", [])
                    )
                except httpx.TransportError:  # not yet there
                    return []

            wait_until(
                lambda: "poc.model.tiny-qwen3" in queues(),
                "the queue in Flower",
                READY_S,
                0.5,
            )
            assert {"name": "poc.model.tiny-qwen3", "messages": 0} in http.get(
                "/api/queues/length"
            ).json()["active_queues"]


@pytest.mark.slow
def test_a_minute_of_work_by_tls_everywhere_loses_and_doubles_nothing() -> None:
    """Jobs, rounds and chat of two real engines; callbacks and clients by mutual TLS."""
    report = run(1.0, seed=1, engine="vllm", faults=[], pause_s=0, log=print, tls=True)
    assert report.problems == []
    for what in ("jobs accepted", "rounds", "nonces of rounds", "chat 200"):
        assert report.counts[what] > 0
