"""Chats whose tokens are known: how they are asked of a running engine, and how far an answer lies
from another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lab.judge.chat_distance import entries as entries_of
from poc_core.serving.position_distance import position_distance
from poc_core.settings import parse_chat_policy
from tests.harness.chat_beside import serve_chat
from tests.harness.chat_client import CHAT
from tests.harness.waiting import wait_until
from tests.stacks.deployments import Deployment
from workers.chat_gate import ChatGate
from workers.engines.base import Engine
from workers.engines.validations import Way

DATA = Path(__file__).parents[2] / "data" / "validation"
CASES: list[dict[str, Any]] = json.loads((DATA / "forced.json").read_text())["cases"]
ENFORCED_STR: dict[str, Any] = json.loads((DATA / "enforced_str.json").read_text())
MODES = ("raw_logprobs", "processed_logprobs")
# Of float32: what one forward and many steps differ by.
SAME = 1e-5
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
# Below it a probability is 0 in float32. vLLM's top_p takes such tokens away, in all rows of a
# batch that has one with top_p: then they are at its floor of -9999.
NEVER = -85.0


@dataclass
class Client:
    """Asks one model."""

    http: httpx.Client
    model: str

    def post(self, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
        return self.http.post(path, json={"model": self.model, **body})

    def ask(self, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
        answer = self.post(body, path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        asked = {"model": self.model, **body, "stream": True}
        with self.http.stream("POST", CHAT, json=asked) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


@dataclass
class Server(Client):
    """Asks an engine that serves chat in this process."""

    engine: Engine

    @contextmanager
    def scoring_by(self, way: Way) -> Iterator[None]:
        """Within: known tokens are scored this way, whatever the trial found."""
        validations = self.engine.validations
        assert validations is not None
        before, validations.way = validations.way, way
        counted = validations.count[way]
        try:
            yield
        finally:
            validations.way = before
        wait_until(lambda: validations.count[way] > counted, f"a validation by {way}")


@contextmanager
def serving(engine: Engine) -> Iterator[Server]:
    gate = ChatGate(parse_chat_policy("yield"), engine.unfinished_chat)
    url = f"http://127.0.0.1:{serve_chat(engine, gate)}"
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=url, timeout=300, limits=limits, trust_env=False) as http:
        yield Server(http, engine.info.name, engine)


@contextmanager
def served(deployment: Deployment, max_batch_tokens: int, *arguments: str) -> Iterator[Server]:
    """A deployment's engine, in steps of so many tokens. `arguments`: further ones of `vllm
    serve`."""
    arguments = ("--max-num-seqs", "32", *_TOOLS, *arguments)
    engine = deployment.start(*arguments, max_batch_tokens=max_batch_tokens)
    try:
        with serving(engine) as server:
            yield server
    finally:
        engine.close()


def known(request: dict[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    """The request as a validator sends it, for these tokens."""
    tokens = [{"token": str(one), "top_tokens": [str(one)]} for one in ids]
    return {**request, "enforced_tokens": {"tokens": tokens}}


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = case["request"]
    return request


def chat(text: str = "Tell me about the sea.", **more: Any) -> dict[str, Any]:
    """A body, as executors get it."""
    messages = [{"role": "user", "content": text}]
    logprobs = {"logprobs": True, "top_logprobs": 5, "return_token_ids": True}
    return {"messages": messages, "max_tokens": 24, "seed": 7, **logprobs, **more}


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    found: str = answer["choices"][choice]["message"]["content"]
    return found


def content(answer: dict[str, Any], choice: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["choices"][choice]["logprobs"]["content"]
    return found


def ids_of(answer: dict[str, Any], choice: int = 0) -> list[int]:
    return [int(one["token"]) for one in content(answer, choice)]


def furthest(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """The largest difference of two contents' logprobs, by id. Entries as good as impossible do not
    count: which ids fill up at -9999 is arbitrary."""
    assert [one["token"] for one in found] == [one["token"] for one in expected]
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        entries, others = (entries_of(position) for position in (one, other))
        assert len(others) == len(entries)
        likely = {token for token, logprob in entries.items() if logprob > NEVER}
        assert likely == {token for token, logprob in others.items() if logprob > NEVER}
        worst = max([worst, *(abs(entries[token] - others[token]) for token in likely)])
        assert other["top_logprobs"][0]["logprob"] == other["logprob"]
        assert list(other["token"].encode()) == other["bytes"]
    return worst


def answers_alike(free: dict[str, Any], forced: dict[str, Any]) -> None:
    assert furthest(content(free), content(forced)) < SAME
    assert text_of(forced) == text_of(free)
    for field in ("finish_reason", "stop_reason", "token_ids"):
        assert forced["choices"][0][field] == free["choices"][0][field]
    assert forced["usage"] == free["usage"]


def distances(executor: list[dict[str, Any]], validator: list[dict[str, Any]]) -> list[float]:
    """Of each position, as the network compares two contents."""
    assert [one["token"] for one in validator] == [one["token"] for one in executor]
    pairs = zip(executor, validator, strict=True)
    return [position_distance(entries_of(one), entries_of(other)) for one, other in pairs]
