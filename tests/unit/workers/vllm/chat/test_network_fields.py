"""The network's fields in bodies: what is read, and what is refused."""

import asyncio
import threading
from typing import Any

import pytest

from workers.vllm.chat.errors import BadRequest, CannotForce, Refused
from workers.vllm.chat.fields import RequestOptions
from workers.vllm.chat.network_fields import NetworkFields

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"


class Letters:
    """A tokenizer whose tokens are characters; of half a surrogate pair real ones make an error."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        text.encode()
        return [ord(one) for one in text]


FIELDS = NetworkFields(512, 16, Letters())


def read(**body: Any) -> RequestOptions | None:
    return asyncio.run(FIELDS.of({"messages": [], **body}))


def tokens(*given: Any) -> dict[str, Any]:
    return {"enforced_tokens": {"tokens": [{"token": one, "top_tokens": ["x"]} for one in given]}}


def refusal(**body: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        read(**body)
    return refused.value


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["7", "511", "0"], [7, 511, 0]),
        (["token_id:7"], [7]),
        (["ab", " 7"], [ord("a"), ord(" ")]),
        (["token_id:"], [ord("t")]),
    ],
)
def test_tokens_are_ids_or_the_first_token_of_a_text(given: list[str], ids: list[int]) -> None:
    assert read(**tokens(*given)) == RequestOptions(True, None, ids)


def test_a_text_wins() -> None:
    assert read(enforced_str="hi", **tokens("7")) == RequestOptions(
        True, None, [ord("h"), ord("i")]
    )


@pytest.mark.parametrize(
    ("said", "mode"),
    [("raw", RAW), (RAW, RAW), ("processed", PROCESSED), (None, None)],
)
def test_modes_have_two_spellings(said: str | None, mode: str | None) -> None:
    assert read(logprobs_mode=said, n=1, **tokens("7")) == RequestOptions(True, mode, [7])


NO_TOKENS = ("512", "99999", "-1", "token_id:512", "", "9" * 5000, "\ud800", "\u0400")
NO_MODES: tuple[Any, ...] = ("foo", 1, "", [RAW], {}, True)
NO_LISTS = [*({"tokens": []}, {"tokens": None}, {}, [], "7", 7), {"tokens": "7"}] + [
    {"tokens": [{"token": "99999"}, one]} for one in ({}, {"token": 7}, "7", None)
]


@pytest.mark.parametrize(
    ("body", "judged"),
    [
        *((tokens("7", token), "enforced_tokens") for token in NO_TOKENS),
        *(({"enforced_tokens": enforced}, None) for enforced in NO_LISTS),
        *(({"enforced_str": text}, "enforced_str") for text in ("", 7, ["a"], "\ud800", "\u0400")),
        *(({"logprobs_mode": mode}, "logprobs_mode") for mode in NO_MODES),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_what_cannot_be_read_is_refused_and_judges_who_gave_it(
    body: dict[str, Any], judged: str | None
) -> None:
    refused = refusal(**body)
    assert (refused.status, refused.param) == (400, judged)


def test_a_beam_search_takes_no_known_tokens() -> None:
    assert isinstance(refusal(use_beam_search=True, **tokens("7")), CannotForce)
    assert read(use_beam_search=True, logprobs_mode=RAW) == RequestOptions(True)


def test_an_engine_without_a_tokenizer_takes_ids_alone() -> None:
    fields = NetworkFields(512, 16, None)
    assert fields.read(tokens("7")) == RequestOptions(True, None, [7])
    with pytest.raises(CannotForce):
        fields.read(tokens("a"))


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"content": '"enforced_tokens": {"tokens": []}'}]},
        {"tools": [{"logprobs_mode": "foo"}]},
    ],
    ids=["in a text", "in a field"],
)
def test_names_elsewhere_mean_nothing(body: dict[str, Any]) -> None:
    assert read(**body) is None


def test_more_tokens_than_the_context_has_judge_nobody() -> None:
    assert read(**tokens(*["7"] * 15)) == RequestOptions(True, None, [7] * 15)
    refused = refusal(max_tokens=100, **tokens(*["7"] * 16))
    assert (refused.status, refused.param) == (400, None)


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(BadRequest, match=r"token id 512; this model has 0 to 511"):
        read(**tokens("512"))


class Hasty:
    """A tokenizer that must not be asked."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError(f"asked for {len(text)} characters, {add_special_tokens}")


@pytest.mark.parametrize(
    "body",
    [
        {"enforced_str": "a" * (8 * 16 + 1)},
        {"enforced_str": "न" * (8 * 16 + 1)},
        tokens(*["the sea"] * 16),
        tokens("a" * 65, "b" * 64),
    ],
    ids=["text", "letters", "tokens", "texts"],
)
def test_what_is_too_long_is_not_made_into_tokens(body: dict[str, Any]) -> None:
    fields = NetworkFields(512, 16, Hasty())
    with pytest.raises(BadRequest, match="context of 16") as refused:
        fields.read(body)
    assert refused.value.param is None  # it judges nobody


TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("asked", "no_grammar"),
    [
        ({"tools": [TOOL]}, True),
        ({"tools": [TOOL], "tool_choice": "auto", "response_format": {"type": "text"}}, True),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": False}}]}, True),
        ({"tools": [TOOL, {"type": "function", "function": {"strict": True}}]}, False),
        ({"tools": [TOOL], "tool_choice": "required"}, False),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, False),
        ({"tools": [TOOL], "parallel_tool_calls": False}, False),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, False),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_grammar_of_this_node_alone_is_left_out(asked: dict[str, Any], no_grammar: bool) -> None:
    """Nodes whose vLLM holds free tool calls to nothing must find their own answers again."""
    assert read(**tokens("7"), **asked) == RequestOptions(True, None, [7], no_grammar)


async def test_tokens_are_made_off_the_event_loop() -> None:
    by: list[threading.Thread] = []

    class Noting(Letters):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            by.append(threading.current_thread())
            return super().encode(text, add_special_tokens)

    assert await NetworkFields(512, 64, Noting()).of({"enforced_str": "hi"}) is not None
    assert by != [threading.current_thread()]
