"""A refused grammar's error names its field."""

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.harness.marks import needs_vllm
from tests.planted.fair_chat import Llm, answer, installed
from workers.vllm.chat.errors import BadRequest

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM


class Refusing(Llm):
    """Which answers a grammar with an error, or with an output that ends by one."""

    def __init__(self, tokenizer: Any, error: Exception | None) -> None:
        super().__init__(tokenizer, [])
        self.vllm_config.structured_outputs_config.backend = "xgrammar"
        self.errored, self.error = False, error

    async def generate(self, _prompt: Any, _params: Any, _request_id: str) -> Any:
        if self.error is not None:
            raise self.error
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="error")])


@pytest.fixture
def refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return partial(why_refused, tokenizer, monkeypatch)


async def why_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, schema: Any, error: Exception | None
) -> str:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from workers.vllm.chat import fair_chat

    async def compiles(*_asked: Any) -> None:
        pass

    monkeypatch.setattr(fair_chat.Grammars, "check", compiles)
    llm = Refusing(tokenizer, error)
    installed(llm)
    how = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    with pytest.raises(BadRequest) as found:
        await answer(llm, how, "a")
    assert found.value.param == "structured_outputs"
    return str(found.value)


async def test_a_grammar_that_allows_no_token_is_the_clients_fault(
    refused: Callable[..., Any],
) -> None:
    assert "refers to itself" in await refused({"$ref": "#"}, None)


@pytest.mark.parametrize("error", [ValueError, RecursionError, KeyError])
async def test_so_is_one_that_vllm_cannot_read(
    refused: Callable[..., Any], error: type[Exception]
) -> None:
    found: Exception = error("no such thing")
    if not isinstance(found, ValueError):  # as vLLM wraps what it does not expect
        found, found.__cause__ = RuntimeError("in generate"), found
    assert "no such thing" in await refused({}, found)


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        (
            {"type": "object", "propertyNames": {"pattern": "a"}, "properties": {"b": {}}},
            "At #: properties, propertyNames.",
        ),
        (
            {"anyOf": [{"type": "array", "items": {}, "uniqueItems": True, "contains": {}}]},
            "At #/anyOf/0: contains, uniqueItems.",
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}},
            "At #/properties/a: multipleOf.",
        ),
        (
            {"type": "integer", "multipleOf": 3, **{f"k{n}": n for n in range(20_000)}},
            "At #: one of its keywords.",
        ),
    ],
    ids=["object", "array", "integer", "20,000 keywords"],
)
async def test_what_xgrammar_does_not_take_of_a_schema_is_named(
    refused: Callable[..., Any], schema: dict[str, Any], what: str
) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    with pytest.raises(Exception, match="not supported by xgrammar") as found:
        validate_xgrammar_grammar(asked)
    assert what in await refused(schema, found.value)


def test_nor_of_one_in_a_structural_tag(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm.release import answers

    chat = installed(Refusing(tokenizer, None)).fair

    def asked(schema: Any) -> Any:
        one = {"begin": "<f>", "schema": schema, "end": "</f>"}
        tag = json.dumps({"structures": [one], "triggers": ["<f"]})
        return SimpleNamespace(structured_outputs=SimpleNamespace(structural_tag=tag))

    chat.refuse(asked({"type": "integer"}))
    with pytest.raises(BadRequest, match="At #/items: multipleOf") as found:
        chat.refuse(asked({"type": "array", "items": {"type": "integer", "multipleOf": 3}}))
    assert found.value.param == "structured_outputs"
    with monkeypatch.context() as patch:
        patch.setattr(answers, "unsupported", Mock(side_effect=RecursionError))
        with pytest.raises(BadRequest, match="nested too deeply"):
            chat.refuse(asked({"type": "integer"}))
    endless = SimpleNamespace(structured_outputs=SimpleNamespace(structural_tag="[" * 100_000))
    chat.refuse(endless)  # the trial reports it


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "none"}},
        {"regex": "("},
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "none"}}'},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_vllms_server_leaves_what_takes_long_to_the_trial(
    tokenizer: Any, asked: dict[str, Any]
) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    installed(Refusing(tokenizer, None))
    validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(**asked)))
