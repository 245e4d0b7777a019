"""A request reaches the worker as it came, and the client gets the worker's answer."""

import http.client
import json
import re
from collections import Counter
from typing import Any

import fakeredis
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import from_json

from poc_core.records import GATEWAY_CLIENT_HEADER
from poc_core.state.history import CHATS, FAILED, FIRST_TOKEN, History
from tests.harness.gateway import ANSWER, CHAT, JSON, Node, Start, answers, body, streams
from tests.harness.samples import MODEL
from tests.harness.waiting import wait_until


class TestPassing:
    def test_request_reaches_the_worker_as_it_came(self, api: httpx.Client, start: Start) -> None:
        worker = start("w1", answers)
        sent = ' {"model" : "tiny-qwen3", "messages":[], "unknown":"é" }'.encode()
        headers = {
            "Authorization": "Bearer key",
            "X-Request-Id": "r-1",
            "Content-Type": "application/json",
        }
        assert api.post(f"{CHAT}?a=1&b=%20", content=sent, headers=headers).status_code == 200
        (received,) = worker.received
        assert received.line == f"POST {CHAT}?a=1&b=%20 HTTP/1.1"
        assert received.body == sent
        assert received.values("authorization") == ["Bearer key"]
        assert received.values("x-request-id") == ["r-1"]
        assert received.values("content-length") == [str(len(sent))]

    def test_no_header_is_added_but_the_connections_own(self, node: Node) -> None:
        worker = node.start("w1", answers)
        connection = http.client.HTTPConnection(node.api.base_url.host, node.api.base_url.port)
        connection.putrequest("POST", CHAT, skip_accept_encoding=True)
        sent = json.dumps(body()).encode()
        connection.putheader("Content-Length", str(len(sent)))
        connection.putheader("Content-Type", "application/json")
        connection.endheaders(sent)
        assert connection.getresponse().read() == ANSWER
        connection.close()
        assert {name.lower() for name, _ in worker.received[0].headers} == {
            "host",
            "content-length",
            "content-type",
            GATEWAY_CLIENT_HEADER,
        }

    def test_a_worker_is_told_clients_apart_and_not_who_they_are(self, node: Node) -> None:
        worker = node.start("w1", answers)
        for claimed in ("somebody", "else"):
            headers = {GATEWAY_CLIENT_HEADER: claimed, **JSON}
            assert (
                node.api.post(CHAT, content=json.dumps(body()), headers=headers).status_code == 200
            )
        told = [received.values(GATEWAY_CLIENT_HEADER) for received in worker.received]
        assert told[0] == told[1]
        ((client,), _) = told
        assert re.fullmatch("[0-9a-f]{16}", client)

    def test_body_in_chunks_arrives_whole(self, api: httpx.Client, start: Start) -> None:
        worker = start("w1", answers)
        sent = json.dumps(body()).encode()
        assert api.post(CHAT, content=iter([sent[:5], sent[5:]]), headers=JSON).status_code == 200
        assert worker.received[0].body == sent
        assert worker.received[0].values("transfer-encoding") == []

    def test_headers_of_one_connection_stay_there(self, api: httpx.Client, start: Start) -> None:
        """RFC 9110, 7.6.1."""
        hop = {
            "Keep-Alive": "timeout=5",
            "Proxy-Authorization": "Basic cHc=",
            "TE": "trailers",
            "Trailer": "Expires",
            "Upgrade": "h2c",
            "Proxy-Authenticate": "Basic",
        }
        worker = start(
            "w1", lambda call: call.answer(ANSWER, "200 OK", *[f"{k}: {v}" for k, v in hop.items()])
        )
        answer = api.post(CHAT, json=body(), headers=hop | {"Connection": "Keep-Alive"})
        assert answer.content == ANSWER
        names = {name.lower() for name in hop} | {"connection"}
        assert {name.lower() for name, _ in worker.received[0].headers} & names == set()
        assert set(answer.headers) & names == set()

    def test_answer_comes_back_byte_for_byte_with_its_headers(self, node: Node) -> None:
        node.start(
            "w1",
            lambda call: call.answer(
                ANSWER, "200 OK", "X-Request-Id: abc", "Set-Cookie: a", "Set-Cookie: b"
            ),
        )
        answer = node.chat()
        assert answer.content == ANSWER
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["content-length"] == str(len(ANSWER))
        assert answer.headers["x-request-id"] == "abc"
        assert answer.headers.get_list("set-cookie") == ["a", "b"]
        assert len(answer.headers.get_list("date")) == 1

    @pytest.mark.parametrize(
        ("head", "content"),
        [
            (["400 Bad Request"], b'{"error":{"message":"max_tokens is too large","code":400}}'),
            (["503 Service Unavailable", "Retry-After: 30"], b"{}"),  # in an exclusive round
            (["200 OK"], b""),
        ],
        ids=["an error", "a refusal", "nothing"],
    )
    def test_answer_of_the_worker_is_the_clients(
        self, node: Node, head: list[str], content: bytes
    ) -> None:
        node.start("w1", lambda call: call.answer(content, *head))
        answer = node.chat()
        assert (f"{answer.status_code} {answer.reason_phrase}", answer.content) == (
            head[0],
            content,
        )
        assert answer.headers.get("retry-after") == ("30" if len(head) > 1 else None)

    @pytest.mark.parametrize(
        "path",
        ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"],
    )
    def test_every_path_is_the_workers(self, api: httpx.Client, start: Start, path: str) -> None:
        worker = start("w1", answers)
        assert api.post(path, json=body()).content == ANSWER
        assert worker.received[0].line == f"POST {path} HTTP/1.1"


class TestTimes:
    """What /metrics tells of requests."""

    def bucket(self, api: httpx.Client, name: str, le: str) -> float | None:
        families = text_string_to_metric_families(api.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        wanted = {"model": MODEL, "le": le}
        return next(
            (one.value for one in samples if one.name == f"{name}_bucket" and one.labels == wanted),
            None,
        )

    def test_first_tokens_are_of_streams_alone(self, api: httpx.Client, start: Start) -> None:
        start(
            "w1",
            lambda call: streams(call) if b"stream" in call.received.body else call.answer(ANSWER),
        )
        whole = "proofline_chat_request_seconds"  # a client has its answer before it is timed
        api.post(CHAT, json=body())
        wait_until(lambda: self.bucket(api, whole, "+Inf") == 1, "the first one's time")
        assert self.bucket(api, "proofline_chat_first_token_seconds", "+Inf") is None
        api.post(CHAT, json=body(stream=True))
        wait_until(lambda: self.bucket(api, whole, "+Inf") == 2, "the second one's time")
        assert self.bucket(api, "proofline_chat_first_token_seconds", "600.0") == 1


def test_chats_are_counted_with_their_first_token_and_their_failures(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(fakeredis.FakeRedis())
    node.services.chats.report(node.services.history, 0.0)  # what other tests left
    # The API's own thread, which reports now and then, may still add it to the other one.
    monkeypatch.setattr(node.services, "history", history)
    node.start("w1", streams)
    node.chat(stream=True)
    node.start("w2", lambda call: call.answer(b"{}", "500 Internal Server Error"), "another")
    node.chat("another")
    node.services.chats.report(history, node.services.now())

    def told() -> tuple[int, int, int]:
        counts: Counter[str] = Counter()
        for step in history.read(480, int(node.services.now() // 480 - 1) * 480, 3):
            counts.update(step)
        first_tokens = sum(n for name, n in counts.items() if name.startswith(FIRST_TOKEN))
        return counts[CHATS], counts[FAILED], first_tokens

    wait_until(lambda: told() == (2, 1, 1), "all counts, also those that the thread adds just now")


def test_a_body_is_parsed_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its model, its bounds, its prefix and its salt."""
    parsed: list[bytes] = []

    def noted(content: bytes) -> Any:
        parsed.append(content)
        return from_json(content)

    for module in ("fields", "suspects"):
        monkeypatch.setattr(f"api.chat.{module}.from_json", noted)
    for name in ("w1", "w2"):
        node.start(name, answers)
    content = json.dumps(body(messages=[{"role": "user", "content": "Hi"}])).encode()
    assert node.api.post(CHAT, content=content, headers=JSON).status_code == 200
    assert parsed == [content]
