"""The gate before vLLM's OpenAI server: what passes, what is counted, how a refusal looks."""

import asyncio
import json
from collections.abc import MutableMapping, Sequence
from typing import Any

import httpx
import pytest

from poc_core.records import (
    ENGINE_LOST_HEADER,
    GATEWAY_CLIENT_HEADER,
    GATEWAY_SALT_HEADER,
    GATEWAY_SECRET_HEADER,
)
from poc_core.settings import parse_chat_policy
from workers.chat_gate import ChatGate
from workers.vllm.chat import gated_chat
from workers.vllm.chat.fields import CLIENT, SALT
from workers.vllm.chat.gated_chat import GatedChat, Receive, Scope, Send

CHAT = "/v1/chat/completions"


def client_of(gated: GatedChat) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(gated), base_url="http://worker")


class Server:
    """Stands in for vLLM's application; remembers how many requests the gate saw while each ran."""

    def __init__(self, policy: str = "yield", secret: str | None = None) -> None:
        self.gate = ChatGate(parse_chat_policy(policy), lambda: 0)
        self.active: list[int] = []
        self.error: BaseException | None = None
        self.error_after: BaseException | None = None  # of its parts
        self.is_lost = False
        self.parts: Sequence[bytes] = (b"ans", b"wer")
        self.lost_after: bytes | None = None  # the part of the answer with which the engine dies
        self.clients: list[tuple[str, str]] = []  # and their salts
        self.client = client_of(GatedChat(self.app, self.gate, lambda: self.is_lost, secret))

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.is_lost = self.is_lost or self.lost_after == b""
        self.clients.append((CLIENT.get(), SALT.get()))
        self.active.append(self.gate.stats().chat_active)
        if self.error is not None:
            raise self.error
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self.is_lost = self.is_lost or part == self.lost_after
        if self.error_after is not None:
            raise self.error_after
        await send({"type": "http.response.body", "body": b""})


async def test_a_request_counts_while_it_runs() -> None:
    server = Server()
    answer = await server.client.post(CHAT)
    assert (answer.status_code, answer.content) == (200, b"answer")
    assert server.active == [1]
    assert (server.gate.stats().chat_active, server.gate.stats().chat_total) == (0, 1)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), asyncio.CancelledError()], ids=["bug", "client gone"]
)
async def test_a_request_that_breaks_leaves_too(error: Any) -> None:
    server = Server()
    server.error = error
    with pytest.raises(type(error)):
        await server.client.post(CHAT)
    assert server.gate.stats().chat_active == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", "/health"), ("GET", "/metrics"), ("POST", "/tokenize")],
)
async def test_what_needs_no_engine_does_not_count(method: str, path: str) -> None:
    server = Server("exclusive")
    server.gate.set_computes_round(True)
    answer = await server.client.request(method, path)
    assert answer.status_code == 200
    assert server.active == [0]


async def test_exclusive_answers_503_with_retry_after_during_a_round_and_200_right_after() -> None:
    server = Server("exclusive")
    server.gate.set_computes_round(True)
    answer = await server.client.post(CHAT)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    error: dict[str, Any] = answer.json()["error"]
    assert "POC_CHAT_POLICY=exclusive" in error["message"]
    assert (error["type"], error["code"]) == ("service_unavailable", 503)
    assert server.active == []
    server.gate.set_computes_round(False)
    assert (await server.client.post(CHAT)).status_code == 200


class LongAnswers:
    """Stands in for vLLM's application: answers until its client leaves."""

    def __init__(self, content_type: bytes = b"", deaf: bool = False) -> None:
        self.gate = ChatGate(parse_chat_policy("exclusive"), lambda: 0)
        paths = [f"POST {path}" for path in (CHAT, "/v1/responses", "/v1/messages")]
        self.gated = GatedChat(self.app, self.gate, lambda: False, paths=paths)
        self.content_type = content_type
        self.deaf = deaf  # it does not look whether its client is there
        self.left: list[str] = []
        self.sent: list[MutableMapping[str, Any]] = []
        self.goes_on = asyncio.Event()
        self.client_leaves = asyncio.Event()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        if self.content_type:
            headers = [(b"content-type", self.content_type)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        self.goes_on.set()
        try:
            self.left.append("cancelled")
            if self.deaf:
                await asyncio.Event().wait()
            self.left[-1] = (await receive())["type"]
        finally:  # as vLLM, which answers `null`
            if not self.deaf:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"null"})

    async def until_a_round_begins(
        self, path: str = CHAT, client_leaves: bool = False
    ) -> tuple[dict[str, Any], bytes]:
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            if not messages:
                await self.client_leaves.wait()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(message: MutableMapping[str, Any]) -> None:
            self.sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        work = asyncio.create_task(self.gated(scope, receive, send))
        await self.goes_on.wait()
        await asyncio.to_thread(self.gate.set_computes_round, True)
        if client_leaves:
            self.client_leaves.set()
        await asyncio.wait_for(work, 60)
        start, *bodies = self.sent
        return dict(start), b"".join(one.get("body", b"") for one in bodies)


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_round_under_exclusive_ends_whole_answers_with_503(
    deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_chat, "_END_S", 0.01 if deaf else 60.0)
    server = LongAnswers(deaf=deaf)
    start, body = await server.until_a_round_begins()
    assert start["status"] == 503
    assert int(dict(start["headers"])[b"retry-after"]) > 0
    assert "PoC generation is active" in json.loads(body)["error"]["message"]
    assert server.left == ["cancelled" if deaf else "http.disconnect"]
    assert server.gate.stats().chat_active == 0


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, b""), ("/v1/responses", b""), ("/v1/messages", b"event: error\n")]
)
async def test_a_round_under_exclusive_ends_streams_with_an_error(path: str, name: bytes) -> None:
    server = LongAnswers(b"text/event-stream; charset=utf-8")
    start, body = await server.until_a_round_begins(path)
    assert start["status"] == 200
    first, event = body.split(b"\n\n", 1)
    assert first == b"data: a"
    assert event.startswith(name + b"data: ")
    error = json.loads(event.removeprefix(name).removeprefix(b"data: "))["error"]
    assert "PoC generation is active" in error["message"]
    assert server.sent[-1].get("more_body", False) is False
    assert server.left == ["http.disconnect"]
    assert server.gate.stats().chat_active == 0


async def test_a_round_under_other_policies_ends_no_answer() -> None:
    server = LongAnswers(b"text/event-stream")
    server.gate = ChatGate(parse_chat_policy("yield"), lambda: 0)
    server.gated = GatedChat(server.app, server.gate, lambda: False)
    _, body = await server.until_a_round_begins(client_leaves=True)
    assert server.left == ["http.disconnect"]
    assert body.endswith(b"null")  # the application's own end, and no error


async def test_what_begins_after_the_engines_end_is_marked_for_the_gateway() -> None:
    server = Server()
    server.is_lost = True
    answer = await server.client.post(CHAT)
    assert answer.status_code == 503
    assert answer.headers[ENGINE_LOST_HEADER] == "0"  # it was in no engine
    assert "was lost" in answer.json()["error"]["message"]


async def test_what_was_in_the_engine_at_its_end_is_marked_too_unless_it_had_begun() -> None:
    server = Server()
    server.lost_after = b""
    answer = await server.client.post(CHAT)
    assert (answer.status_code, answer.headers[ENGINE_LOST_HEADER]) == (503, "1")
    server = Server()
    server.lost_after = b"ans"
    answer = await server.client.post(CHAT)
    assert (answer.status_code, answer.content) == (200, b"answer")


async def test_a_stream_begins_with_what_the_engine_has_a_part_in() -> None:
    created, begun = (
        b"event: response.%b\ndata: {}\n\n" % name for name in (b"created", b"in_progress")
    )
    token = b"event: response.output_text.delta\ndata: {}\n\n"
    server = Server()
    server.parts, server.lost_after = (created, begun, token), token
    answer = await server.client.post(CHAT)
    assert (answer.status_code, answer.content) == (200, created + begun + token)
    server = Server()
    server.parts, server.lost_after = (created, begun, b"event: error\ndata: {}\n\n"), begun
    answer = await server.client.post(CHAT)
    assert (answer.status_code, answer.headers[ENGINE_LOST_HEADER]) == (503, "1")


async def test_a_stream_that_breaks_before_its_first_token_is_marked_too() -> None:
    server = Server()
    server.parts = (b"event: response.created\ndata: {}\n\n",)
    server.lost_after, server.error_after = server.parts[0], RuntimeError("EngineDeadError")
    answer = await server.client.post(CHAT)
    assert (answer.status_code, answer.headers[ENGINE_LOST_HEADER]) == (503, "1")
    server.is_lost, server.lost_after = False, None
    with pytest.raises(RuntimeError):
        await server.client.post(CHAT)


async def test_the_engines_side_is_told_the_client_and_its_salt() -> None:
    server = Server()
    headers = {GATEWAY_CLIENT_HEADER: "a", GATEWAY_SALT_HEADER: "b"}
    await server.client.post(CHAT, headers=headers)
    await server.client.post(CHAT)
    assert server.clients == [("a", "b"), ("", "")]


async def test_lifespan_reaches_the_server() -> None:
    seen: list[str] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope["type"])

    gated = GatedChat(app, ChatGate(parse_chat_policy("yield"), lambda: 0), lambda: False)
    await gated({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


# vLLM's paths that run any method of the workers, scale, sleep, or load what they are told to.
_ADMINISTRATIVE = (
    *("collective_rpc", "scale_elastic_ep", "sleep", "reset_prefix_cache"),
    *("v1/load_lora_adapter", "metrics/"),
)


@pytest.mark.parametrize(
    "path", [*_ADMINISTRATIVE, "v1/models/", "v1/chat/completions/render", "docs"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_only_what_chat_needs_is_served(method: str, path: str) -> None:
    server = Server()
    answer = await server.client.request(method, f"/{path}")
    assert answer.status_code == 404
    assert server.active == []


@pytest.mark.promise("a stranger at a worker's chat port", "gets 401 without the worker's secret")
@pytest.mark.parametrize(
    "given", [{}, {GATEWAY_SECRET_HEADER: "another"}, {GATEWAY_SECRET_HEADER: ""}]
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/health"), ("GET", "/x")]
)
async def test_a_stranger_gets_nothing_but_401(
    method: str, path: str, given: dict[str, str]
) -> None:
    server = Server(secret="of this start")
    assert (await server.client.request(method, path, headers=given)).status_code == 401
    assert server.active == []


async def test_the_gateway_is_known_by_its_secret() -> None:
    server = Server(secret="of this start")
    answer = await server.client.post(CHAT, headers={GATEWAY_SECRET_HEADER: "of this start"})
    assert answer.status_code == 200


async def test_a_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    gated = GatedChat(Server().app, ChatGate(parse_chat_policy("yield"), lambda: 0), lambda: False)
    await gated({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_what_is_served_follows_the_server() -> None:
    paths = ["POST /v1/score", "GET /v1/responses/{response_id}"]
    gated = GatedChat(
        Server().app, ChatGate(parse_chat_policy("yield"), lambda: 0), lambda: False, paths=paths
    )
    async with client_of(gated) as client:
        assert (await client.post("/v1/score")).status_code == 200
        assert (await client.get("/v1/responses/resp_1")).status_code == 200
        for path in ("/v1/rerank", "/v1/chat/completions", "/sleep", "/v1/load_lora_adapter"):
            assert (await client.post(path)).status_code == 404
