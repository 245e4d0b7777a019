"""Bodies that are refused before any worker sees them."""

import contextlib
import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from anyio import to_thread

from api.chat.fields import fields_of
from tests.harness.gateway import CHAT, JSON, MAX_BODY_BYTES, Node, answers, body
from tests.harness.samples import known, worker_record
from tests.harness.waiting import wait_until


class TestBadBodies:
    @pytest.mark.parametrize(
        ("sent", "why"),
        [
            (b"{", "no JSON: EOF while parsing an object at line 1 column 1"),
            (b'{"model": "x",\n "messages": [}', "no JSON: expected value at line 2 column 15"),
            (b"a=b", "no JSON: expected value at line 1 column 1"),
            (b'{"messages": [{"content": "\\ud83d"}]}', "column 34, which is half of a surrogate"),
            (b'{"x": "\\udc00"}', "surrogate in hex escape at line 1 column"),
            (b'{"model": "\xff\xfe"}', "not UTF-8: byte 0xff at position 11"),
            ('{"model": "x"}'.encode("utf-16"), "not UTF-8: byte 0xff at position 0"),
            ('{"model": "\ud800"}'.encode("utf-8", "surrogatepass"), "byte 0xed at position 11"),
            (
                gzip.compress(b"{}", mtime=0),
                "The body is gzip; say so with the header Content-Encoding: gzip.",
            ),
            (b'\xef\xbb\xbf{"model": "x"}', "begins with a byte order mark"),
            ('{"model": "x"}'.encode("utf-16-le"), "is UTF-16 or UTF-32"),
            ('{"model": "x"}'.encode("utf-32-be"), "is UTF-16 or UTF-32"),
            (b"[]", "must be a JSON object"),
            (b'"text"', "must be a JSON object"),
            (b'{"model": 5}', "`model` must be a string"),
            (b'{"messages": null}', "messages must be a list"),
            (b"[" * 100_000, "recursion limit exceeded at line 1 column"),
        ],
    )
    def test_what_cannot_be_read_is_400_that_says_why(
        self, node: Node, sent: bytes, why: str
    ) -> None:
        worker = node.start("w1", answers)
        answer = node.api.post(CHAT, content=sent, headers=JSON)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert why in error["message"]
        assert worker.received == []

    @pytest.mark.parametrize("encoding", ["gzip", "GZIP"])
    def test_compressed_body_reaches_the_worker_as_it_was_before(
        self, node: Node, encoding: str
    ) -> None:
        worker = node.start("w1", answers)
        sent = json.dumps(body()).encode()
        headers = JSON | {"Content-Encoding": encoding}
        assert node.api.post(CHAT, content=gzip.compress(sent), headers=headers).status_code == 200
        (received,) = worker.received
        assert received.body == sent
        assert received.values("content-encoding") == []

    @pytest.mark.parametrize(
        ("path", "more", "param"),
        [
            (CHAT, {"n": 10_000, "max_tokens": 1 << 20}, "max_tokens"),
            (CHAT, {"structured_outputs": True}, "structured_outputs"),
            (CHAT, {"tools": [5]}, "tools"),
            (CHAT, {"messages": "x"}, "messages"),
            (CHAT, {"messages": None}, "messages"),
            ("/tokenize", {"prompt": "x" * 150_000}, "prompt"),
            ("/v1/responses", {"input": [{}] * 30_000}, "input"),
            (
                CHAT,
                {"chat_template_kwargs": {f"{n}": 1 for n in range(10_000)}},
                "chat_template_kwargs",
            ),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_what_vllm_would_break_on_or_be_held_by_is_400_by_its_field(
        self, node: Node, path: str, more: dict[str, Any], param: str
    ) -> None:
        worker = node.start("w1", answers)
        answer = node.api.post(path, json=body() | more)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert worker.received == []

    def test_a_body_of_nothing_but_short_items_is_refused_unparsed(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("poc_core.chat_bounds.MAX_COMMAS", 1000)
        monkeypatch.setattr("api.chat.fields.fields_of", lambda *_: pytest.fail("parsed"))
        worker = node.start("w1", answers)
        answer = node.chat(items=[1] * 2000)
        assert answer.status_code == 413
        assert "split the request" in answer.json()["error"]["message"]
        assert worker.received == []

    def test_other_requests_go_on_after_each_large_body(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on, steps = threading.Event(), []

        def parses(content_type: str, body: bytes) -> dict[str, Any]:
            if len(body) > 1000:
                steps.append("parsed")
            return fields_of(content_type, body)

        async def pauses(_: float) -> None:
            steps.append("paused")
            await to_thread.run_sync(go_on.wait)

        monkeypatch.setattr("api.chat.prefixes.MAX_BODY", 1000)
        monkeypatch.setattr("api.chat.fields.fields_of", parses)
        monkeypatch.setattr("api.routes.openai.sleep", pauses)
        node.start("w1", answers)
        with ThreadPoolExecutor() as pool:
            large = [pool.submit(node.chat, padding="x" * 2000) for _ in range(2)]
            try:
                wait_until(lambda: "paused" in steps, "the first pause")
                assert node.chat().status_code == 200
            finally:
                go_on.set()
            assert [one.result().status_code for one in large] == [200, 200]
        assert steps == ["parsed", "paused"] * 2

    def test_more_known_tokens_than_any_context_holds_are_refused_unparsed(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = node.start("w1", answers)
        info = known(worker_record("w1").info)
        context = info.max_seq_len
        monkeypatch.setattr("api.chat.fields.fields_of", lambda *_: pytest.fail("parsed"))
        answer = node.chat(enforced_tokens=[{"token": "9"}] * (context + 1))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], f"context of {context}" in error["message"]) == (None, True)
        assert worker.received == []

    @pytest.mark.parametrize("chunked", [False, True])
    def test_body_over_the_limit_is_413(self, node: Node, chunked: bool) -> None:
        worker = node.start("w1", answers)
        sent = json.dumps(body(padding="x" * MAX_BODY_BYTES)).encode()
        with contextlib.suppress(httpx.WriteError):  # refused before all was sent
            answer = node.api.post(CHAT, content=iter([sent]) if chunked else sent, headers=JSON)
            assert answer.status_code == 413
        assert worker.received == []
