"""What one request may have computed: answers and their tokens, by the engine's own limits."""

import json
from typing import Any

import pytest

from api.chat.bounds import Excess, excess
from poc_core.records import ModelInfo

CONTEXT = 4096
ENGINE = ModelInfo("m", 64, 2, CONTEXT, 8192, "bfloat16", max_sequences=256)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def refused(**asked: Any) -> Excess | None:
    return excess(json.dumps(asked).encode(), [ENGINE])


@pytest.mark.parametrize(
    "asked",
    [
        CHAT,
        CHAT | {"max_tokens": 10 * CONTEXT},
        CHAT | {"n": 16},
        CHAT | {"n": 128, "max_completion_tokens": 512},
        {"prompt": list(range(4000)), "n": 4},
        {"prompt": ["x"] * 128},
        {"prompt": [[1, 2]] * 64, "n": 2, "max_tokens": 100},
        CHAT | {"n": None, "max_tokens": None},
        {"input": ["x"] * 4000},
    ],
    ids=str,
)
def test_what_clients_ask_for_passes(asked: dict[str, Any]) -> None:
    assert refused(**asked) is None


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (CHAT | {"n": 10_000, "max_tokens": 64}, "n"),
        (CHAT | {"n": "10000"}, "n"),
        (CHAT | {"n": 1e4}, "n"),
        (CHAT | {"n": 129, "max_tokens": 1}, "n"),
        ({"prompt": "x", "best_of": 10_000}, "best_of"),
        ({"prompt": ["x"] * 2000}, "prompt"),
        ({"prompt": [[1]] * 100, "n": 2}, "n"),
        ({"messages": [CHAT["messages"]] * 200}, "messages"),
        (CHAT | {"n": 17}, "max_tokens"),
        (CHAT | {"n": 128, "max_completion_tokens": 513}, "max_completion_tokens"),
        ({"prompt": ["x"] * 100, "max_tokens": None}, "max_tokens"),
    ],
    ids=str,
)
def test_what_would_fill_an_engine_is_refused_by_its_field(
    asked: dict[str, Any], field: str
) -> None:
    found = refused(**asked)
    assert found is not None
    assert found.field == field


@pytest.mark.parametrize("body", [b"", b"[]", b"no JSON", b'{"n":"many"}', b'{"n":{}}'])
def test_what_vllm_refuses_is_left_to_it(body: bytes) -> None:
    assert excess(body, [ENGINE]) is None


def test_a_name_written_with_escapes_is_the_same_name() -> None:
    assert excess(rb'{"\u006e": 10000}', [ENGINE]) is not None


def test_an_engine_that_is_not_known_sets_no_bound() -> None:
    assert excess(b'{"n":10000}', []) is None


def schema(n: int, depth: int) -> dict[str, Any]:
    """An object of `n` properties, so deep."""
    inner: dict[str, Any] = {"type": "object", "properties": {f"p{k}": {} for k in range(n)}}
    for _ in range(depth // 2 - 1):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def in_schema(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": inner}}


def tool(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": inner}}


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"choice": [f"choice {n}" for n in range(1000)]}},
        {"structured_outputs": {"regex": "(a|b)+" * 100}},
        {"response_format": in_schema(schema(500, 20))},
        {"response_format": {"type": "json_object"}},
        {"tools": [tool(schema(20, 8))] * 128},
        {"tools": None, "text": None},
    ],
    ids=lambda asked: str(asked)[:40],
)
def test_grammars_that_clients_send_pass(asked: dict[str, Any]) -> None:
    assert refused(**CHAT, **asked) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"choice": [f"choice {n}" for n in range(100_000)]}},
        {"structured_outputs": {"grammar": "root ::= " + "a" * 200_000}},
        {"structured_outputs": {"regex": "(a|b)+" * 30_000}},
        {"structured_outputs": {"json": "[" * 200_000}},
        {"response_format": in_schema(schema(20_000, 4))},
        {"response_format": in_schema(schema(1, 80))},
        {"tools": [tool(schema(200, 8))] * 128},
        {"text": {"format": in_schema(schema(20_000, 4))}},
    ],
    ids=lambda asked: str(asked)[:40],
)
def test_grammars_without_measure_are_refused_by_their_field(asked: dict[str, Any]) -> None:
    found = refused(**CHAT, **asked)
    assert found is not None
    assert [found.field] == [*asked]
