"""What an engine could not hold is refused with the field's name, whatever model of a request it
comes in."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel, ConfigDict

from poc_core.settings import parse_chat_policy
from workers.chat_gate import ChatGate
from workers.vllm.chat.errors import BadRequest
from workers.vllm.chat.gated_chat import GatedChat
from workers.vllm.chat.limits import Limits

NAN, INFINITE = float("nan"), float("inf")


class Inner(BaseModel):
    depth: Any = None


@dataclass
class Grammar:
    json: Any = None


@dataclass
class Repetitions:
    max_pattern_size: int
    min_count: int


class Asked(BaseModel):
    """Stands for any of vLLM's models."""

    model_config = ConfigDict(extra="allow")
    top_k: int = 0
    seed: int | None = None
    n: int | None = None
    temperature: float = 0.0
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] = []
    stop: str | list[str] | None = None
    thinking_token_budget: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    inner: Inner | None = None
    structured_outputs: Grammar | None = None
    repetition_detection: Repetitions | None = None


POISON: list[dict[str, Any]] = [
    {"top_k": 2**64},
    {"top_k": -(2**63) - 1},
    {"top_k": 10**400},
    {"top_k": str(2**64)},
    {"temperature": NAN},
    {"temperature": "Infinity"},
    {"logit_bias": {"5": NAN}},
    {"logit_bias": {"5": "NaN"}},
    {"logit_bias": {str(n): 1.0 for n in range(1025)}},
    {"allowed_token_ids": [5] * 1025},
    {"allowed_token_ids": [5, 2**64]},
    {"bad_words": ["a"] * 129},
    {"bad_words": ["a" * 8193]},
    {"stop": ["a"] * 129},
    {"thinking_token_budget": 2**31},
    {"seed": 2**63},
    {"seed": -(2**63) - 1},
    {"seed": 2**63 - 2, "n": 3},
    {"length_penalty": -(2**31)},
    {"length_penalty": 10.5},
    {"vllm_xargs": {"a": [1, {"b": 2**64}]}},
    {"vllm_xargs": {"a": [[[[-INFINITE]]]]}},
    {"inner": {"depth": [2**64]}},
    {"repetition_detection": {"max_pattern_size": 8000, "min_count": 2}},
    {"repetition_detection": {"max_pattern_size": 2, "min_count": 2**40}},
    {"structured_outputs": {"json": {"maximum": 2**64}}},
    {"vllm_xargs": {"\ud800": 1}},
    {"stop": "a\udfff"},
    {"of_a_later_release": 2**64},
]
GOOD: list[dict[str, Any]] = [
    {"top_k": 2**64 - 1},
    {"top_k": -(2**63)},
    {"logit_bias": {str(n): -1.0 for n in range(1024)}},
    {"allowed_token_ids": [5] * 1024},
    {"bad_words": ["a" * 64] * 128},
    {"stop": "a" * 10_000},
    {"stop": ["a"] * 128},
    {"thinking_token_budget": 2**31 - 1},
    {"seed": 2**63 - 1},
    {"seed": 2**63 - 2, "n": 2},
    {"length_penalty": -10.0},
    {"repetition_detection": {"max_pattern_size": 64, "min_count": 16}},
    {"vllm_xargs": {"a": [1.5, True, None, "NaN"]}},
]


@pytest.mark.parametrize("body", POISON, ids=lambda body: str(body)[:60])
def test_what_no_engine_can_hold_is_refused_by_its_name(body: dict[str, Any]) -> None:
    field, *_ = body
    with pytest.raises(BadRequest, match=field) as refused:
        Limits().refuse(Asked(**body))
    assert refused.value.param == field


@pytest.mark.parametrize("body", GOOD, ids=lambda body: str(body)[:60])
def test_what_it_can_hold_passes(body: dict[str, Any]) -> None:
    Limits().refuse(Asked(**body))


def test_words_and_stop_ids_are_counted_once_they_are_tokens() -> None:
    def params(**said: Any) -> Any:
        return SimpleNamespace(**said)

    limits = Limits()
    refused: list[tuple[str, Any]] = [
        ("bad_words", params(bad_words_token_ids=[[5] * 9] * 114)),
        ("bad_words", params(bad_words_token_ids=[[5]] * 129)),
        ("max_tokens", params(max_tokens=2**31 - 10)),
        ("min_tokens", params(min_tokens=2**40, all_stop_token_ids=())),
        ("stop_token_ids", params(min_tokens=1, all_stop_token_ids=set(range(129)))),
    ]
    for field, one in refused:
        with pytest.raises(BadRequest) as error:
            limits.refuse_tokens(one)
        assert error.value.param == field
    for one in (
        params(bad_words_token_ids=[[5] * 8] * 128),
        params(min_tokens=0, all_stop_token_ids=set(range(400))),
        params(min_tokens=1, all_stop_token_ids=set(range(128))),
    ):
        limits.refuse_tokens(one)


def test_looking_through_much_stops_for_others() -> None:
    assert sum(1 for _ in Limits().check(Asked(vllm_xargs={"a": [1] * 100_000}))) > 20


@pytest.fixture
def check_bodies() -> Callable[[Any, Any], None]:
    api_server = pytest.importorskip("workers.vllm.release.api_server")
    found: Callable[[Any, Any], None] = api_server.check_bodies
    return found


@pytest.mark.xdist_group("engines")
async def test_every_route_of_an_application_is_checked(
    check_bodies: Callable[[Any, Any], None],
) -> None:
    app = FastAPI()
    reached: list[str] = []

    @app.post("/v1/of/a/later/release")
    async def later(body: Asked) -> str:
        reached.append("later")
        await asyncio.sleep(0)
        return "yes"

    async def check(_path: str, _request: Any, values: Iterable[Any]) -> None:
        for value in values:
            Limits().refuse(value)

    check_bodies(app, check)
    gate = ChatGate(parse_chat_policy("yield"), lambda: 0)
    served = GatedChat(app, gate, lambda: False, paths=["POST /v1/of/a/later/release"])
    async with AsyncClient(transport=ASGITransport(served), base_url="http://w") as http:
        for content in ('{"logit_bias": {"5": NaN}}', f'{{"top_k": {2**64}}}'):
            answer = await http.post(
                "/v1/of/a/later/release",
                content=content,
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] in content
        assert reached == []
        assert (await http.post("/v1/of/a/later/release", json={"top_k": 5})).json() == "yes"


@pytest.mark.xdist_group("engines")
async def test_null_in_a_field_that_vllm_repeats_is_the_fields_default(
    check_bodies: Callable[[Any, Any], None],
) -> None:
    """vLLM's own answer has no null there: its error came after the stream's first event."""
    protocol: Any = import_module("vllm.entrypoints.openai.responses.protocol")
    app = FastAPI()

    async def responses(body: Any) -> Any:
        params = import_module("vllm").SamplingParams(max_tokens=3)
        answer = protocol.ResponsesResponse.from_request(body, params, "m", 1, [], "in_progress")
        return answer.model_dump(include={"background", "truncation"})

    responses.__annotations__["body"] = protocol.ResponsesRequest
    app.post("/v1/responses")(responses)

    async def check(_path: str, _request: Any, _values: Iterable[Any]) -> None:
        pass

    check_bodies(app, check)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://w") as http:
        asked = {"input": "The sea is", "background": None, "truncation": None}
        answer = await http.post("/v1/responses", json=asked)
    assert answer.json() == {"background": False, "truncation": "disabled"}
