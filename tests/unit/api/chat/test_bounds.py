"""What one request may have computed: answers and their tokens, by the engine's own limits; how
much may stand in each field; and objects where objects are due."""

import reprlib
from typing import Any

import pytest

from poc_core.chat_bounds import FIELDS, KNOWN_TOKENS, Excess, excess
from poc_core.records import ModelInfo
from poc_core.serving.openai_paths import PASSED_ON, PATHS
from tests.harness.samples import known

CONTEXT = 4096
CHARS = 8 * CONTEXT  # of a prompt
ENGINE = ModelInfo("m", 64, 2, CONTEXT, 8192, "bfloat16", max_sequences=256)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETE, ANSWER, RESPOND = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBED, RERANK, SCORE, TOKENIZE = "/v1/embeddings", "/v1/rerank", "/score", "/tokenize"
MESSAGES = "/v1/messages"


def refused(path: str = ANSWER, **asked: Any) -> Excess | None:
    found = excess(path, asked, [ENGINE])
    return found if isinstance(found, Excess) else None


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


def text(part: str) -> dict[str, str]:
    return {"type": "text", "text": part}


WIDE = {"logprobs": True, "top_logprobs": 20}
# Scripts of three bytes a letter, and lists far from the margin.
NEAR_FULL = ("नमस्ते दुनिया ", "สวัสดีชาวโลก", "မင်္ဂလာပါ ကမ္ဘာ", " " * 24 + "0,\n")
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (1 << 20)}}


@pytest.mark.promise("a chat user who calls a vLLM path that the node does not limit", "gets 404")
def test_every_path_that_is_passed_on_and_has_a_body_is_bounded() -> None:
    posted = {one.removeprefix("POST ") for one in PASSED_ON if one.startswith("POST ")}
    assert posted - PATHS.keys() == {"/v1/responses/{response_id}/cancel"}
    assert PATHS.keys() <= posted


def test_every_field_whose_entries_are_prompts_has_a_row() -> None:
    named = {name for row in FIELDS for name in row.fields.split()} | {*KNOWN_TOKENS}
    assert {name for _, prompts in PATHS.values() for name in prompts} <= named


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (ANSWER, CHAT),
        (ANSWER, CHAT | {"max_tokens": 10 * CONTEXT}),
        (ANSWER, CHAT | {"n": 16}),
        (ANSWER, CHAT | {"n": 128, "max_completion_tokens": 512}),
        (COMPLETE, {"prompt": list(range(4000)), "n": 4}),
        (COMPLETE, {"prompt": ["x"] * 128}),
        (COMPLETE, {"prompt": [[1, 2]] * 64, "n": 2, "max_tokens": 100}),
        (COMPLETE, {"prompt": None, "prompt_embeds": "A" * (1 << 20)}),
        (ANSWER, CHAT | {"n": None, "max_tokens": None, "tools": None, "tool_choice": None}),
        (ANSWER, CHAT | {"metadata": "of another server's", "thinking": True}),
        (ANSWER, user([text("x"), PICTURE] * 8)),
        (ANSWER, user("x" * (CHARS - 100))),
        (ANSWER, CHAT | {"top_logprobs": 20, "logprobs": True, "n": 4}),
        (ANSWER, CHAT | {"top_logprobs": 20, "n": 16}),
        (ANSWER, user("x" * (CHARS - 100)) | {"prompt_logprobs": 20, "max_tokens": 1}),
        (COMPLETE, {"prompt": "x" * CHARS, "echo": True, "logprobs": 5, "max_tokens": CONTEXT}),
        (ANSWER, CHAT | {"enforced_tokens": {"tokens": [{"token": "9707"}] * (CONTEXT - 1)}}),
        (ANSWER, CHAT | {"enforced_tokens": 5, "enforced_str": []}),
        (RESPOND, {"input": "x", "text": {"format": {"type": "text"}}, "reasoning": None}),
        (RESPOND, {"input": [{"type": "message", "role": "user", "content": "x"}] * 100}),
        (MESSAGES, CHAT | {"system": [text("x")], "max_tokens": 5, "stream": True}),
        (TOKENIZE, {"prompt": "x" * CHARS}),
        *((TOKENIZE, {"prompt": one * (CHARS // len(one))}) for one in NEAR_FULL),
        *((ANSWER, CHAT | {"enforced_str": one * (CHARS // len(one))}) for one in NEAR_FULL),
        (COMPLETE, {"prompt": "x" * 100_000, "truncate_prompt_tokens": 64}),
        (ANSWER, user("x" * 100_000) | {"truncate_prompt_tokens": -1}),
        (RESPOND, {"input": "x" * 100_000, "truncation": "auto"}),
        (
            COMPLETE,
            {"prompt": ["x" * 4000] * 16, "prompt_logprobs": 20, "truncate_prompt_tokens": 200},
        ),
        (ANSWER, CHAT | WIDE | {"n": 5}),
        (ANSWER, CHAT | {"n": 17}),
        (TOKENIZE, CHAT | {"prompt": None}),
        (TOKENIZE, {"prompt": "x", "messages": None, "n": 10_000}),
        ("/detokenize", {"tokens": [1] * CONTEXT}),
        (EMBED, {"input": ["x" * 1000] * 2048}),
        (EMBED, {"input": ["x" * 32_000] * 64}),
        (EMBED, {"input": [[1, 2]] * 2048}),
        (RERANK, {"query": "x", "documents": ["x" * 100] * 1000}),
        (RERANK, {"query": "x", "documents": [{"content": [text("x"), PICTURE]}] * 50}),
        (SCORE, {"text_1": "x", "text_2": ["x"] * 2000}),
        ("/v2/embed", {"images": ["data:image/png;base64," + "A" * (1 << 20)] * 4}),
        ("/pooling", {"data": {"image": "A" * (1 << 20)}}),
        ("/v1/audio/transcriptions", {"response_format": "json", "model": "m"}),
    ],
    ids=lambda one: reprlib.repr(one)[:40],
)
def test_what_clients_ask_for_passes(path: str, asked: dict[str, Any]) -> None:
    assert refused(path, **asked) is None


@pytest.mark.promise("a chat user who asks for too much", "gets an error that names the field")
@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        (ANSWER, CHAT | {"n": 10_000, "max_tokens": 64}, "n"),
        (ANSWER, CHAT | {"n": "10000"}, "n"),
        (ANSWER, CHAT | {"n": 1e4}, "n"),
        (ANSWER, CHAT | {"n": 129, "max_tokens": 1}, "n"),
        (COMPLETE, {"prompt": "x", "best_of": 10_000}, "best_of"),
        (COMPLETE, {"prompt": ["x"] * 2000}, "prompt"),
        (COMPLETE, {"prompt": [[1]] * 100, "n": 2}, "n"),
        ("/v1/chat/completions/batch", {"messages": [CHAT["messages"]] * 200}, "messages"),
        (ANSWER, CHAT | {"n": 128, "max_completion_tokens": 513}, "max_completion_tokens"),
        (ANSWER, CHAT | {"n": 17, "max_tokens": CONTEXT}, "max_tokens"),
        ("/v1/audio/translations", {"n": "10000"}, "n"),
        (
            ANSWER,
            CHAT | {"n": 64, "max_tokens": 512, "logprobs": True, "top_logprobs": 20},
            "top_logprobs",
        ),
        (ANSWER, CHAT | WIDE | {"n": 5, "max_tokens": CONTEXT}, "top_logprobs"),
        (
            ANSWER,
            CHAT
            | {"n": 16, "logprobs": True, "logprob_token_ids": list(range(20)), "max_tokens": 2000},
            "top_logprobs",
        ),
        (
            RESPOND,
            {"input": "x", "n": 16, "top_logprobs": 20, "max_output_tokens": CONTEXT},
            "top_logprobs",
        ),
        (COMPLETE, {"prompt": ["x"] * 64, "max_tokens": 1024, "logprobs": 20}, "logprobs"),
        (ANSWER, user("x" * (CHARS - 100)) | {"prompt_logprobs": 20, "n": 16}, "prompt_logprobs"),
        (COMPLETE, {"prompt": ["x" * 4000] * 8, "prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETE, {"prompt": ["x" * 4000] * 16, "prompt_logprobs": 20}, "prompt_logprobs"),
        (COMPLETE, {"prompt": ["x" * 4000] * 16, "echo": True, "logprobs": 20}, "echo"),
        (TOKENIZE, {"prompt": "x" * 8_000_000}, "prompt"),
        (TOKENIZE, {"prompt": "x" * (CHARS + 1)}, "prompt"),
        (TOKENIZE, user("\u6d77" * (CHARS + 1)), "messages"),
        (TOKENIZE, {"prompt": " " * (4 * CHARS + 4)}, "prompt"),
        (COMPLETE, {"prompt": "x" * 200_000, "truncate_prompt_tokens": 64}, "prompt"),
        ("/detokenize", {"tokens": [1] * (CONTEXT + 1)}, "tokens"),
        (ANSWER, user("x" * (CHARS + 1)), "messages"),
        (ANSWER, user([text("a")] * 100_000), "messages"),
        (ANSWER, {"messages": [{"role": "user", "content": "a"}] * 10_000}, "messages"),
        (ANSWER, CHAT | {"chat_template_kwargs": {str(n): n for n in range(200_000)}}, 0),
        (ANSWER, CHAT | {"chat_template_kwargs": {"a": [[1, "x"]] * 2000}}, 0),
        (ANSWER, CHAT | {"chat_template_kwargs": {"image": "x" * 8_000_000}}, 0),
        (ANSWER, CHAT | {"documents": [{"image": "x" * 1000}] * 1000}, "documents"),
        (ANSWER, CHAT | {"tools": [{"function": {}, "image": "x" * 8_000_000}]}, "tools"),
        (ANSWER, user("x", image="x" * 8_000_000), "messages"),
        (
            ANSWER,
            user("x", tool_calls=[{"function": {"arguments": {"image": "x" * 8_000_000}}}]),
            "messages",
        ),
        (ANSWER, CHAT | {"bad_words": ["x" * 1000] * 100}, "bad_words"),
        (ANSWER, CHAT | {"stop": ["x"] * 5000}, "stop"),
        (ANSWER, CHAT | {"unheard_of": ["x" * 100_000] * 80}, "unheard_of"),
        (ANSWER, CHAT | {"unheard_of": {str(n): n for n in range(20_000)}}, "unheard_of"),
        (COMPLETE, {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
        (COMPLETE, {"prompt": ["x" * CHARS] * 17}, "prompt"),
        (RESPOND, {"input": [{"type": "message", "content": "x"}] * 60_000}, "input"),
        (RESPOND, {"input": "x", "instructions": "x" * 8_000_000}, "instructions"),
        (RESPOND, {"input": "x", "previous_input_messages": [{}] * 60_000}, 0),
        (MESSAGES, CHAT | {"system": "x" * 8_000_000, "max_tokens": 1}, "system"),
        ("/v1/messages/count_tokens", CHAT | {"system": "x" * 8_000_000}, "system"),
        ("/v1/chat/completions/render", user("x" * 8_000_000), "messages"),
        (EMBED, {"input": ["x"] * 2049}, "input"),
        (EMBED, {"input": ["x"] * 60_000}, "input"),
        (EMBED, {"input": "x" * 8_000_000}, "input"),
        (EMBED, {"input": ["x" * 32_000] * 100}, "input"),
        (RERANK, {"query": "x", "documents": ["x"] * 20_000}, "documents"),
        (RERANK, {"query": "x", "documents": [{"content": [text("x")]}] * 3000}, "documents"),
        (RERANK, {"query": "x" * 30_000, "documents": ["x"] * 1000}, "query"),
        (SCORE, {"queries": ["x"] * 20_000, "items": ["x"]}, "queries"),
        ("/classify", {"input": ["x"] * 20_000}, "input"),
        ("/v2/embed", {"texts": ["x"] * 20_000}, "texts"),
        ("/v2/embed", {"inputs": [{"content": [text("x")]}] * 3000}, "inputs"),
    ],
    ids=lambda one: reprlib.repr(one)[:40],
)
def test_what_would_fill_an_engine_or_hold_what_is_before_it_is_refused_by_its_field(
    path: str, asked: dict[str, Any], field: str | int
) -> None:
    found = known(refused(path, **asked))
    assert found.field == (field or [*asked][-1])


@pytest.mark.parametrize(
    "asked",
    [
        {"enforced_str": "x" * (CHARS + 1)},
        {"enforced_str": "hello w\u00f6rld " * 700_000},
        {"enforced_tokens": {"tokens": [{"token": "no id"}] * 200_000}},
        {"enforced_tokens": {"tokens": [{"token": "9"}] * CONTEXT}},
        {"enforced_tokens": {"tokens": [{"token": "x" * 200_000}]}},
    ],
    ids=lambda asked: str(asked)[:40],
)
def test_known_tokens_beyond_the_context_judge_nobody(asked: dict[str, Any]) -> None:
    found = known(refused(**CHAT, **asked))
    assert found.field is None


@pytest.mark.parametrize("wrong", [True, 5, "x", [], [{}]], ids=str)
@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((ANSWER, name) for name in ("structured_outputs", "response_format", "logit_bias")),
        *((ANSWER, name) for name in ("chat_template_kwargs", "stream_options", "vllm_xargs")),
        (COMPLETE, "structured_outputs"),
        *((RESPOND, name) for name in ("structured_outputs", "text", "reasoning", "metadata")),
        *((MESSAGES, name) for name in ("output_config", "thinking", "metadata")),
    ],
)
def test_what_is_no_object_where_one_is_due_is_refused(path: str, name: str, wrong: Any) -> None:
    found = known(refused(path, **{name: wrong}))
    assert (found.field, found.message) == (name, f"{name} must be an object.")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (ANSWER, {"messages": None}),
        (ANSWER, {"messages": 5}),
        (ANSWER, {"messages": "x"}),
        (ANSWER, {"messages": [{"role": "assistant", "tool_calls": 5}]}),
        (ANSWER, {"messages": [{"role": "assistant", "tool_calls": [5]}]}),
        (ANSWER, {"tools": 5}),
        (ANSWER, {"tools": [5]}),
        (ANSWER, {"tools": [{"type": "function", "function": 5}]}),
        (ANSWER, {"tool_choice": 5}),
        (ANSWER, {"chat_template_kwargs": {"tools": 1}}),
        (ANSWER, {"tool_choice": {"type": "function", "function": "f"}}),
        (ANSWER, {"response_format": {"type": "json_schema", "json_schema": 5}}),
        (RESPOND, {"tools": True}),
        (MESSAGES, {"tools": {"a": 1}}),
        (TOKENIZE, {"messages": 5}),
    ],
    ids=lambda one: str(one)[:50],
)
def test_lists_and_what_is_in_them_are_looked_at_too(path: str, asked: dict[str, Any]) -> None:
    found = known(refused(path, **asked))
    assert [found.field] == [*asked]
    assert "must be" in found.message


@pytest.mark.parametrize("asked", [{}, {"n": "many"}, {"n": {}}, {"max_tokens": True}], ids=str)
def test_what_vllm_refuses_is_left_to_it(asked: dict[str, Any]) -> None:
    assert refused(**asked) is None


@pytest.mark.parametrize(
    ("path", "asked", "each"),
    [
        (ANSWER, CHAT | {"n": 16}, None),
        (ANSWER, CHAT | {"n": 17}, 16 * CONTEXT // 17),
        (ANSWER, CHAT | WIDE | {"n": 4}, None),
        (ANSWER, CHAT | WIDE | {"n": 5}, 96 * CONTEXT // (5 * 21)),
        (ANSWER, CHAT | WIDE | {"n": 5, "max_tokens": None}, 96 * CONTEXT // (5 * 21)),
        (ANSWER, CHAT | WIDE | {"n": 5, "max_tokens": 9}, None),
        (RESPOND, {"input": "x", "n": 16, "top_logprobs": 20}, 96 * CONTEXT // (16 * 21)),
        (COMPLETE, {"prompt": ["x"] * 100}, None),
        (COMPLETE, {"prompt": ["x"] * 100, "max_tokens": None}, 16 * CONTEXT // 100),
    ],
    ids=lambda one: str(one)[:60],
)
def test_answers_without_a_limit_have_one_where_they_could_fill_an_engine(
    path: str, asked: dict[str, Any], each: int | None
) -> None:
    assert excess(path, asked, [ENGINE]) == each


def test_an_engine_that_is_not_known_sets_no_bound_of_its_own() -> None:
    assert excess(ANSWER, {"n": 10_000} | user("x" * CHARS * 2), []) is None
    assert excess(ANSWER, {"structured_outputs": True}, []) is not None


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


@pytest.mark.promise("a chat user who asks for too much", "gets an error that names the field")
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
        {"output_config": {"format": in_schema(schema(20_000, 4))}},
    ],
    ids=lambda asked: str(asked)[:40],
)
def test_grammars_without_measure_are_refused_by_their_field(asked: dict[str, Any]) -> None:
    found = known(refused(**CHAT, **asked))
    assert [found.field] == [*asked]


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        (ANSWER, CHAT | {"logprobs": True, "top_logprobs": 10**4299}, "top_logprobs"),
        (ANSWER, CHAT | {"prompt_logprobs": 10**4299}, "prompt_logprobs"),
        (COMPLETE, {"prompt": ["x"] * 16, "n": 10**4299}, "n"),
        (COMPLETE, {"prompt": ["x"] * 16, "n": "9" * 4299}, "n"),
        (COMPLETE, {"prompt": "x", "logprobs": 10**4299}, "logprobs"),
    ],
    ids=lambda one: reprlib.repr(one)[:40],
)
def test_numbers_of_thousands_of_digits_are_refused_too(
    path: str, asked: dict[str, Any], field: str
) -> None:
    """JSON may have 4,300 digits, which Python prints; not so a product of them."""
    assert known(refused(path, **asked)).field == field
