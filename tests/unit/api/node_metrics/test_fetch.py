"""A worker's own vLLM is asked for its metrics, over a real socket."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from api.node_metrics import fetch as module
from api.node_metrics.fetch import FetchError, fetch
from tests.peers.fake_worker import Call, FakeWorker

TEXT = 'vllm:num_requests_running{engine="0"} 1.0\n'


def tells(call: Call) -> None:
    call.answer(TEXT.encode())


def streams(call: Call) -> None:
    call.begin_stream()
    call.chunk(*(letter.encode() for letter in TEXT))
    call.end_stream()


@pytest.mark.parametrize("behave", [tells, streams])
def test_its_text_comes_as_it_is(behave: Callable[[Call], None]) -> None:
    with FakeWorker("w1", behave) as worker:
        assert asyncio.run(fetch(worker.record)) == TEXT
    assert worker.received[0].line == "GET /metrics HTTP/1.1"


def test_it_is_asked_as_the_nodes_gateway() -> None:
    with FakeWorker("w1", tells) as worker:
        asyncio.run(fetch(replace(worker.record, chat_secret="made at its start")))
    assert worker.received[0].values("x-proofline-gateway-secret") == ["made at its start"]


def hangs_up(call: Call) -> None:
    call.head("200 OK", "Content-Length: 100")
    call.send(b"vllm:")


def talks_nonsense(call: Call) -> None:
    call.send(b"\x16\x03 thanks for nothing\r\n\r\n")


def refuses(call: Call) -> None:
    call.answer(b"{}", "401 Unauthorized")


def never_ends(call: Call) -> None:
    call.begin_stream()
    while True:
        call.chunk(b"x" * 65536)


@pytest.mark.parametrize("behave", [hangs_up, talks_nonsense, refuses, never_ends])
def test_one_that_does_not_tell_them_is_an_error(behave: Callable[[Call], None]) -> None:
    with FakeWorker("w1", behave) as worker, pytest.raises(FetchError, match="worker w1"):
        asyncio.run(fetch(worker.record))


def says_nothing(call: Call) -> None:
    call.wait_hung_up()


def test_one_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.1)
    with (
        FakeWorker("w1", says_nothing) as worker,
        pytest.raises(FetchError, match="TimeoutError"),
    ):
        asyncio.run(fetch(worker.record))


def test_one_that_is_gone_is_an_error() -> None:
    with FakeWorker("w1", tells) as worker:
        record = worker.record
    with pytest.raises(FetchError, match="worker w1"):
        asyncio.run(fetch(record))


def test_one_whose_host_is_no_host_name_is_an_error() -> None:
    with FakeWorker("w1", tells) as worker, pytest.raises(FetchError, match="worker w1"):
        asyncio.run(fetch(replace(worker.record, chat_host="no..name")))
