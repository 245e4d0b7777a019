"""Of a client's headers a worker gets only what the client may say to it."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import fakeredis
import httpx
import pytest

from api.app import create_app
from api.edge.connections import Limits, limited
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.records import GATEWAY_SECRET_HEADER
from poc_core.settings import Settings
from tests.harness.samples import RecordingDispatcher
from tests.peers.fake_worker import Call, FakeWorker
from tests.stacks.served import port_of, served

CHAT = "/v1/chat/completions"
SENT = b'{"model":"tiny-qwen3","messages":[]}'
SECRET = "of the worker's start"


def answers(call: Call) -> None:
    call.answer(b"{}", "200 OK", "Connection: close, X-Inner", "X-Inner: 1", "X-Outer: 2")


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    with FakeWorker("w1", answers) as worker:
        yield worker


@pytest.fixture(scope="module")
def port(worker: FakeWorker) -> Iterator[int]:
    """Of an API in front of the worker, as `proofline api` runs it."""
    services = Services(Settings(), fakeredis.FakeRedis(), cast(Dispatcher, RecordingDispatcher()))
    services.workers.heartbeat(replace(worker.record, chat_secret=SECRET))
    with served(create_app(services=services), http=limited(Limits(100)), ws="none") as server:
        yield port_of(server)


@pytest.fixture(autouse=True)
def forgets(worker: FakeWorker) -> None:
    worker.received.clear()


def ask(port: int, head: str, body: bytes = SENT) -> bytes:
    """The whole answer to a request as it goes over the wire."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall((head + "\r\n\r\n").encode("latin-1") + body)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def chat(*headers: str, target: str = CHAT, host: str = "x") -> str:
    common = ["Content-Type: application/json", f"Content-Length: {len(SENT)}", "Connection: close"]
    return "\r\n".join([f"POST {target} HTTP/1.1", f"Host: {host}", *common, *headers])


@pytest.mark.parametrize(
    "host", ["a/collective_rpc#", "a/collective_rpc?", "a#", "127.0.0.1:1/x#", "[::1]/x#"]
)
def test_a_host_header_leads_to_no_other_path(port: int, worker: FakeWorker, host: str) -> None:
    assert b" 421 " in ask(port, chat(host=host)).split(b"\r\n")[0]
    assert worker.received == []


@pytest.mark.parametrize("path", [CHAT, f"http://x{CHAT}", "/v1/chat%2fcompletions"])
def test_the_path_is_the_routes_and_the_query_as_it_came(
    port: int, worker: FakeWorker, path: str
) -> None:
    assert b" 200 " in ask(port, chat(target=f"{path}?a=1%23&b=%2e")).split(b"\r\n")[0]
    assert worker.received[0].line == f"POST {CHAT}?a=1%23&b=%2e HTTP/1.1"


@pytest.mark.parametrize(
    "target", ["/collective_rpc", f"{CHAT}/../../sleep", "//sleep", "/V1/models"]
)
def test_no_other_path_gets_to_a_worker(port: int, worker: FakeWorker, target: str) -> None:
    assert b" 404 " in ask(port, chat(target=target)).split(b"\r\n")[0]
    assert worker.received == []


def test_headers_named_in_connection_stay_here(port: int, worker: FakeWorker) -> None:
    answer = ask(port, chat("Connection: X-Hop, x-other", "X-Hop: 1", "X-Other: 2", "X-End: 3"))
    assert {name.lower() for name, _ in worker.received[0].headers} & {
        "x-hop",
        "x-other",
        "x-end",
    } == {"x-end"}
    assert b"x-outer" in answer.lower()
    assert b"x-inner" not in answer.lower()


def test_a_trailer_stays_here(port: int, worker: FakeWorker) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close"
    chunked = (
        f"{len(SENT):x}\r\n".encode()
        + SENT
        + b"\r\n0\r\nX-Late: 1\r\nAuthorization: Bearer 2\r\n\r\n"
    )
    assert b" 200 " in ask(port, head + "\r\nTransfer-Encoding: chunked", chunked).split(b"\r\n")[0]
    assert {name.lower() for name, _ in worker.received[0].headers} & {
        "x-late",
        "authorization",
    } == set()


def test_blanks_behind_a_value_do_not_belong_to_it(port: int, worker: FakeWorker) -> None:
    assert b" 200 " in ask(port, chat("X-One: 1 \t")).split(b"\r\n")[0]
    assert worker.received[0].values("x-one") == ["1"]


def test_a_worker_knows_its_gateway_and_no_client_can_say_it_is(
    port: int, worker: FakeWorker
) -> None:
    ask(port, chat(f"{GATEWAY_SECRET_HEADER}: a guess"))
    assert worker.received[0].values(GATEWAY_SECRET_HEADER) == [SECRET]


def test_the_secret_is_shown_to_nobody(port: int) -> None:
    for path in ("/api/v1/pow/status", "/api/v1/inference/pow/status", "/metrics", "/v1/models"):
        assert SECRET not in httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).text
