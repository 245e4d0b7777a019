"""Requests to the gateway, and the behaviour of fake workers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from api.routes.services import Services
from poc_core.records import ENGINE_LOST_HEADER
from poc_core.serving.openai_paths import USUAL
from tests.harness.samples import MODEL
from tests.peers.fake_worker import Call, FakeWorker

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
# vLLM's own bytes, with odd spacing and non-ASCII text, must come through as they are.
ANSWER = '{"id":"x",  "choices":[{"message":{"content":"été – 海"}}]}\n'.encode()
EVENTS = [
    f'data: {{"choices":[{{"delta":{{"content":"{word} "}}}}]}}\n\n'.encode()
    for word in ("one", "é", "海")
]
DONE = b"data: [DONE]\n\n"

MAX_BODY_BYTES = 200_000

Start = Callable[..., FakeWorker]


@dataclass
class Node:
    """The API, its services, and how its workers are started."""

    api: httpx.Client
    services: Services
    start: Start

    def chat(self, model: str | None = MODEL, **more: Any) -> httpx.Response:
        return self.api.post(CHAT, json=body(model, **more))


def body(model: str | None = MODEL, **more: Any) -> dict[str, Any]:
    return ({} if model is None else {"model": model}) | {"messages": []} | more


def answers(call: Call) -> None:
    call.answer(ANSWER)


def streams(call: Call) -> None:
    call.begin_stream()
    call.chunk(*EVENTS, DONE)
    call.end_stream()


def hangs_up(call: Call) -> None:
    return


def loses_its_engine(call: Call) -> None:
    call.answer(b"{}", "503 Service Unavailable", f"{ENGINE_LOST_HEADER}: 1")


AUDIO = "/v1/audio/transcriptions"
ELSEWHERE = ("/score", "/pooling", "/v2/rerank", "/cohere/v2/chat")
PUBLISHED = (
    *USUAL,
    *(f"POST {path}" for path in ("/v1/score", "/v1/messages", AUDIO, *ELSEWHERE)),
    "GET /v1/responses/{response_id}",
)
