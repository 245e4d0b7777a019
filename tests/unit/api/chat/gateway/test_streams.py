"""Streams: events, failures, waits, and clients that disconnect."""

import http.client
import json
import threading
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api.chat.streams import failure
from tests.harness.gateway import (
    ANSWER,
    CHAT,
    DONE,
    EVENTS,
    JSON,
    PUBLISHED,
    Node,
    Start,
    answers,
    body,
    hangs_up,
    streams,
)
from tests.harness.samples import MODEL
from tests.harness.waiting import wait_until
from tests.peers.fake_worker import Behaviour, Call


class TestStreams:
    def test_events_come_byte_for_byte(self, api: httpx.Client, start: Start) -> None:
        start("w1", streams)
        answer = api.post(CHAT, json=body(stream=True))
        assert answer.content == b"".join(EVENTS) + DONE
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"

    def test_every_event_comes_as_soon_as_it_is_there(self, node: Node) -> None:
        seen = [threading.Event() for _ in EVENTS]

        def waits_for_the_client(call: Call) -> None:
            call.begin_stream()
            for event, was_seen in zip(EVENTS, seen, strict=True):
                call.chunk(event)
                assert was_seen.wait(60)
            call.end_stream()

        node.start("w1", waits_for_the_client)
        with node.api.stream("POST", CHAT, json=body(stream=True)) as answer:
            n = 0
            for chunk in answer.iter_raw():
                assert chunk == EVENTS[n]
                seen[n].set()
                n += 1
        assert n == len(EVENTS)

    def test_events_cut_in_pieces_come_whole(self, api: httpx.Client, start: Start) -> None:
        def cuts(call: Call) -> None:
            call.begin_stream()
            for byte in b"".join(EVENTS) + b"data: no newline at the end":
                call.chunk(bytes([byte]))
            call.end_stream()

        start("w1", cuts)
        assert (
            api.post(CHAT, json=body()).content == b"".join(EVENTS) + b"data: no newline at the end"
        )


WRONG = b'data: {"error": {"message": "Grammar error", "type": "BadRequestError", "code": 400}}\n\n'
EARLY = b'event: response.created\ndata: {"type": "response.created"}\n\n'


class TestStreamsThatFail:
    """Before their first token: by their own status, as whole answers."""

    @pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
    @pytest.mark.parametrize("before", [b"", b": waits\n\n", EARLY, EARLY.replace(b"\n", b"\r\n")])
    def test_have_the_status_of_their_first_event(
        self, node: Node, path: str, before: bytes
    ) -> None:
        def fails(call: Call) -> None:
            call.begin_stream()
            for part in (before[:20], before[20:], WRONG[:9], WRONG[9:], DONE):
                if part:
                    call.chunk(part)
            call.end_stream()

        worker = node.start("w1", fails)
        node.services.workers.heartbeat(replace(worker.record, chat_paths=PUBLISHED))
        answer = node.api.post(path, json=body(stream=True))
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
        assert answer.json()["error"]["message"] == "Grammar error"

    @pytest.mark.parametrize(
        ("code", "status"), [(400, 400), (599, 599), (399, 500), (600, 500), ("400", 500)]
    )
    def test_what_is_no_status_of_an_error_is_500(self, code: Any, status: int) -> None:
        failed = failure(CHAT, b'data: {"error": {"code": %s}}\n\n' % json.dumps(code).encode())
        assert failed is not None
        assert failed[0] == status

    def test_as_anthropics_events_say_it(self, node: Node) -> None:
        error = {"type": "error", "error": {"type": "internal_error", "message": "oh"}}

        def fails(call: Call) -> None:
            call.begin_stream()
            call.chunk(b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n")
            call.end_stream()

        worker = node.start("w1", fails)
        node.services.workers.heartbeat(replace(worker.record, chat_paths=PUBLISHED))
        answer = node.api.post("/v1/messages", json=body(stream=True))
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "oh")

    def test_later_end_with_an_event(self, api: httpx.Client, start: Start) -> None:
        def fails(call: Call) -> None:
            call.begin_stream()
            call.chunk(EVENTS[0], WRONG, DONE)
            call.end_stream()

        start("w1", fails)
        answer = api.post(CHAT, json=body(stream=True))
        assert (answer.status_code, answer.content) == (200, EVENTS[0] + WRONG + DONE)

    def test_and_whose_worker_dies_are_tried_elsewhere(self, node: Node) -> None:
        def dies(call: Call) -> None:
            call.begin_stream()
            call.chunk(EARLY)

        node.start("w1", dies)
        node.start("w2", streams)
        answer = node.api.post("/v1/responses", json=body(stream=True))
        assert answer.content == b"".join(EVENTS) + DONE


class TestStreamsThatWait:
    """Their clients get empty lines, which keep proxies from closing the connection."""

    @pytest.fixture(autouse=True)
    def often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("api.chat.gateway.KEEP_ALIVE_S", 0.1)

    def test_begin_before_their_worker_answers(self, api: httpx.Client, start: Start) -> None:
        seen = threading.Event()

        def waits(call: Call) -> None:
            assert seen.wait(60)
            streams(call)

        start("w1", waits)
        with api.stream("POST", CHAT, json=body(stream=True)) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            parts = answer.iter_raw()
            assert (next(parts), next(parts)) == (b"\n", b"\n")
            seen.set()
            assert b"".join(parts).lstrip(b"\n") == b"".join(EVENTS) + DONE

    def test_get_them_between_events_and_never_within(self, node: Node) -> None:
        seen = threading.Event()

        def waits(call: Call) -> None:
            call.begin_stream()
            call.chunk(EVENTS[0])
            assert seen.wait(60)
            call.chunk(b"event: x\n")
            time.sleep(0.5)
            call.chunk(b"data: y\n\n")
            call.end_stream()

        node.start("w1", waits)
        with node.api.stream("POST", CHAT, json=body(stream=True)) as answer:
            parts = (part for part in answer.iter_raw())
            first = next(part for part in parts if part != b"\n")  # they may come before it too
            assert (first, next(parts)) == (EVENTS[0], b"\n")
            seen.set()
            assert b"".join(parts).strip(b"\n") == b"event: x\ndata: y"

    def test_are_tried_elsewhere_until_their_first_token(self, node: Node) -> None:
        seen = threading.Event()
        node.start("w1", lambda call: seen.wait(60))
        node.start("w2", streams)
        with node.api.stream("POST", CHAT, json=body(stream=True)) as answer:
            parts = answer.iter_raw()
            assert next(parts) == b"\n"
            seen.set()
            assert b"".join(parts).lstrip(b"\n") == b"".join(EVENTS) + DONE

    @pytest.mark.parametrize(
        ("fails", "message"),
        [
            (lambda call: call.answer(b'{"detail": "no"}', "400 Bad Request"), "no"),
            (hangs_up, "No worker could answer; try again in some seconds."),
        ],
        ids=["refused", "dead"],
    )
    @pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
    def test_end_with_an_error_event_where_that_comes_late(
        self, node: Node, fails: Behaviour, message: str, path: str
    ) -> None:
        seen = threading.Event()

        def fails_late(call: Call) -> None:
            assert seen.wait(60)
            fails(call)

        worker = node.start("w1", fails_late)
        node.services.workers.heartbeat(replace(worker.record, chat_paths=PUBLISHED))
        with node.api.stream("POST", path, json=body(stream=True)) as answer:
            parts = answer.iter_raw()
            assert next(parts) == b"\n"
            seen.set()
            name, _, data = b"".join(parts).strip(b"\n").rpartition(b"data: ")
        assert json.loads(data)["error"]["message"] == message
        assert name == (b"event: error\n" if path == "/v1/messages" else b"")

    def test_whole_answers_get_none(self, api: httpx.Client, start: Start) -> None:
        def slow(call: Call) -> None:
            time.sleep(0.5)
            call.answer(ANSWER)

        start("w1", slow)
        assert api.post(CHAT, json=body(stream=False)).content == ANSWER

    def test_openais_client_reads_them(self, api: httpx.Client, start: Start) -> None:
        import openai

        def slow(call: Call) -> None:
            time.sleep(0.5)
            call.begin_stream()
            for event in (*EVENTS, DONE):
                call.chunk(event)
                time.sleep(0.3)
            call.end_stream()

        start("w1", slow)
        client = openai.OpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model=MODEL, messages=[], stream=True)
        texts = [event.choices[0].delta.content for event in stream]
        assert texts == ["one ", "é ", "海 "]


class TestClientsThatGo:
    @pytest.mark.parametrize("when", ["before the head", "before the first event", "in the stream"])
    def test_cancel_what_the_worker_does_for_them(self, node: Node, when: str) -> None:
        hung_up: list[bool] = []

        def works_on(call: Call) -> None:
            if when != "before the head":
                call.begin_stream()
            if when == "in the stream":
                call.chunk(EVENTS[0])
            hung_up.append(call.wait_hung_up())

        worker = node.start("w1", works_on)
        connection = http.client.HTTPConnection(node.api.base_url.host, node.api.base_url.port)
        connection.request("POST", CHAT, json.dumps(body(stream=True)), JSON)
        wait_until(lambda: worker.received)
        if when == "in the stream":
            assert connection.getresponse().read1() == EVENTS[0]
        connection.close()
        wait_until(lambda: hung_up)
        assert hung_up == [True]
        wait_until(lambda: not node.services.gateway._active)

    def test_leave_no_second_worker_at_work(self, node: Node) -> None:
        """A request that is given up is not tried elsewhere."""
        first, second = (
            node.start("w1", lambda call: call.wait_hung_up()),
            node.start("w2", answers),
        )
        connection = http.client.HTTPConnection(node.api.base_url.host, node.api.base_url.port)
        connection.request("POST", CHAT, json.dumps(body()), JSON)
        wait_until(lambda: first.received)
        connection.close()
        wait_until(lambda: not node.services.gateway._active)
        assert second.received == []

    def test_load_is_forgotten_with_the_requests(self, node: Node) -> None:
        node.start("w1", hangs_up)
        node.start("w2", answers)
        for _ in range(5):
            node.chat()
        wait_until(lambda: not node.services.gateway._active)
