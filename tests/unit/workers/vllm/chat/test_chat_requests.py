"""Requests on their way to vLLM's server: what the engine's side is told, and how a refusal comes
out, whatever that server makes of it."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from poc_core.settings import parse_chat_policy
from workers.chat_gate import ChatGate
from workers.vllm.chat.errors import BadRequest, CannotForce, Unavailable
from workers.vllm.chat.fields import TOLD, RequestOptions
from workers.vllm.chat.gated_chat import App, GatedChat, Receive, Scope, Send
from workers.vllm.release.extra_args import KNOWN_TOKENS, LOGPROBS_MODE, NAMES, TOKEN_IDS

CHAT = "/v1/chat/completions"
KNOWN: dict[str, Any] = {"enforced_tokens": {"tokens": [{"token": "7"}]}}


def gated(app: App, ids_for_all: bool = True) -> GatedChat:
    gate = ChatGate(parse_chat_policy("yield"), lambda: 0)
    return GatedChat(app, gate, lambda: False, ids_for_all=ids_for_all)


class Server:
    """Stands in for vLLM's application, which answers exceptions by itself and raises them."""

    def __init__(self, ids_for_all: bool = True, engine: Callable[[], None] | None = None) -> None:
        self.told: list[RequestOptions | None] = []
        self._engine = engine or (lambda: None)
        requests = gated(self.app, ids_for_all)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(requests), base_url="http://worker"
        )

    async def app(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        self.told.append(TOLD.get())
        try:
            self._engine()
            status = 200
        except Exception:
            status = 500
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await send({"type": "http.response.body", "body": b"answer"})
        if status == 500:
            raise RuntimeError("as Starlette does")

    async def post(self, path: str = CHAT, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)


@pytest.mark.parametrize("ids_for_all", [True, False], ids=["ids", "text"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
async def test_ordinary_requests_are_named_by_ids_where_the_deployment_says_so(
    ids_for_all: bool, path: str
) -> None:
    server = Server(ids_for_all)
    assert (await server.post(path, prompt="Hi")).text == "one answer"
    assert server.told == [RequestOptions(ids=ids_for_all)]


def cannot() -> None:
    raise CannotForce("drafts are in their place")


def foreign() -> None:
    raise BadRequest("stop_token_ids has ...", "stop_token_ids")


@pytest.mark.parametrize(
    ("engine", "status", "param"), [(cannot, 503, None), (foreign, 400, "stop_token_ids")]
)
async def test_what_the_engines_side_refuses_is_answered_so(
    engine: Callable[[], None], status: int, param: str | None
) -> None:
    answer = await Server(engine=engine).post(**KNOWN)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert "one " not in answer.text


async def test_other_failures_stay_the_servers() -> None:
    def fails() -> None:
        raise ValueError("a bug")

    with pytest.raises(RuntimeError, match="Starlette"):
        await Server(engine=fails).post(**KNOWN)


async def test_one_refusal_is_no_other_requests() -> None:
    turns = [cannot, lambda: None]
    server = Server(engine=lambda: turns.pop(0)())
    assert (await server.post(**KNOWN)).status_code == 503
    assert (await server.post(**KNOWN)).status_code == 200


class Params:
    """Of vLLM's SamplingParams what is asked here."""

    def __init__(self, extra: dict[str, Any] | None, logprobs: int | None = 5) -> None:
        self.extra_args, self.logprobs, self.prompt_logprobs = extra, logprobs, None


def test_a_clients_own_entries_are_dropped() -> None:
    forged = {name: [1] for name in NAMES} | {"kv": 1}
    assert RequestOptions().extra_args(Params(forged)) == {"kv": 1}
    found = RequestOptions(True, "raw_logprobs", [7]).extra_args(Params(forged))
    assert found == {"kv": 1, KNOWN_TOKENS: [7], LOGPROBS_MODE: "raw_logprobs", TOKEN_IDS: 1}


def test_chat_without_logprobs_is_told_nothing() -> None:
    assert RequestOptions(ids=True).extra_args(Params(None, None)) is None


EARLY = b"event: response.created\ndata: {}\n\n"


class Stream:
    """vLLM's server that streams these events, and then lets an error through."""

    def __init__(self, *events: bytes, error: Exception | None) -> None:
        self._events = events
        self._error = error
        requests = gated(self.app)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(requests), base_url="http://worker"
        )

    async def app(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        if self._error is not None:
            raise self._error
        await send({"type": "http.response.body", "body": b""})

    async def post(self) -> httpx.Response:
        return await self.client.post(CHAT, json={})


def refused() -> Exception:
    return BadRequest("no such grammar", "structured_outputs")


def too_late(error: Exception) -> Exception:
    """As Starlette raises the error of a stream that has begun."""
    raised = RuntimeError("Caught handled exception, but response already started.")
    raised.__cause__ = error
    return raised


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (refused, 400, "no such grammar"),
        (lambda: ValueError("no such value"), 400, "no such value"),
        (lambda: RuntimeError("secret"), 500, "its log has the reason"),
        (lambda: too_late(ValueError("no such value")), 400, "no such value"),
        (lambda: too_late(KeyError("secret")), 500, "its log has the reason"),
    ],
)
async def test_a_stream_that_breaks_off_before_its_answer_has_a_status(
    error: Callable[[], Exception], status: int, message: str
) -> None:
    """vLLM announces a response before its engine has seen the request."""

    class Raises(Stream):
        async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
            self._error = error()  # within the request that it is noted with
            await super().app(scope, receive, send)

    answer = await Raises(EARLY, EARLY.replace(b"created", b"in_progress"), error=None).post()
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_one_that_breaks_off_later_ends_with_an_event() -> None:
    answer = await Stream(EARLY, b"data: one\n\n", error=ValueError("no such value")).post()
    assert answer.status_code == 200
    head, _, last = answer.content.rpartition(b"data: ")
    assert head == EARLY + b"data: one\n\n"
    assert json.loads(last)["error"] == {
        "message": "no such value",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }


async def test_one_that_ends_comes_as_it_is() -> None:
    answer = await Stream(EARLY, b"data: one\n\n", error=None).post()
    assert (answer.status_code, answer.content) == (200, EARLY + b"data: one\n\n")


async def test_what_may_be_answered_soon_says_when() -> None:
    def not_yet() -> None:
        raise Unavailable("Not yet.")

    answer = await Server(engine=not_yet).post()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
