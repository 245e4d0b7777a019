"""The network's fields in bodies: what is read, what is refused, what stays unparsed."""

import json
from typing import Any

import pytest

from workers.vllm.chat import network_fields
from workers.vllm.chat.errors import BadRequest, CannotForce, Refused
from workers.vllm.chat.fields import Told
from workers.vllm.chat.network_fields import NetworkFields

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"


class Letters:
    """A tokenizer whose tokens are characters; of half a surrogate pair real ones make an error."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        text.encode()
        return [ord(one) for one in text]


FIELDS = NetworkFields(512, 16, Letters(), PROCESSED)


def read(**body: Any) -> Told | None:
    return FIELDS.read(json.dumps({"messages": [], **body}).encode())


def tokens(*given: Any) -> dict[str, Any]:
    return {"enforced_tokens": {"tokens": [{"token": one, "top_tokens": ["x"]} for one in given]}}


def refusal(**body: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        read(**body)
    return refused.value


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(_body: bytes) -> None:
        raise AssertionError("the body was parsed")

    monkeypatch.setattr(network_fields.json, "loads", loads)


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
    assert read(**tokens(*given)) == Told(True, None, ids)


def test_a_text_wins() -> None:
    assert read(enforced_str="hi", **tokens("7")) == Told(True, None, [ord("h"), ord("i")])


@pytest.mark.parametrize(
    ("said", "mode"),
    [("raw", RAW), (RAW, RAW), ("processed", PROCESSED), (None, None)],
)
def test_modes_have_two_spellings(said: str | None, mode: str | None) -> None:
    assert read(logprobs_mode=said, n=1, **tokens("7")) == Told(True, mode, [7])


@pytest.mark.parametrize(
    "token",
    [*("512", "99999", "-1", "token_id:512", "", "9" * 5000, "\ud800", "\u0400")],
    ids=ascii,
)
def test_what_is_no_token_here_judges_who_gave_it(token: str) -> None:
    refused = refusal(**tokens("7", token))
    assert (refused.status, refused.param) == (400, "enforced_tokens")


@pytest.mark.parametrize(
    "enforced",
    [*({"tokens": []}, {"tokens": None}, {}, [], "7", 7), {"tokens": "7"}]
    + [{"tokens": [{"token": "99999"}, one]} for one in ({}, {"token": 7}, "7", None)],
    ids=str,
)
def test_what_is_no_list_of_tokens_judges_nobody(enforced: Any) -> None:
    refused = refusal(enforced_tokens=enforced)
    assert (refused.status, refused.param) == (400, None)


@pytest.mark.parametrize("text", ["", 7, ["a"], "\ud800", "\u0400"], ids=ascii)
def test_what_is_no_known_text_judges_nobody(text: Any) -> None:
    refused = refusal(enforced_str=text)
    assert (refused.status, refused.param) == (400, "enforced_str")


@pytest.mark.parametrize("mode", ["foo", 1, "", ["raw_logprobs"], {}, True], ids=str)
def test_another_mode_is_refused(mode: Any) -> None:
    refused = refusal(logprobs_mode=mode)
    assert (refused.status, refused.param) == (400, "logprobs_mode")


def test_a_beam_search_takes_no_known_tokens() -> None:
    assert isinstance(refusal(use_beam_search=True, **tokens("7")), CannotForce)
    assert read(use_beam_search=True, logprobs_mode=RAW) == Told(True)


def test_an_engine_without_a_tokenizer_takes_ids_alone() -> None:
    fields = NetworkFields(512, 16, None, PROCESSED)
    assert fields.read(json.dumps(tokens("7")).encode()) == Told(True, None, [7])
    with pytest.raises(CannotForce):
        fields.read(json.dumps(tokens("a")).encode())


@pytest.mark.usefixtures("unparsed")
@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "caf\\u00e9 \\u003c \\u4e2d \\n"}]}',
        b'{"prompt": "tokens", "logprobs": 5}',
        b"no JSON",
        b"",
    ],
)
def test_ordinary_bodies_stay_unparsed(body: bytes) -> None:
    assert FIELDS.read(body) is None


@pytest.mark.usefixtures("unparsed")
@pytest.mark.parametrize("said", ["processed", PROCESSED])
def test_so_do_those_with_the_deployments_mode_alone(said: str) -> None:
    assert read(logprobs_mode=said) == Told(ids=True)


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


@pytest.mark.parametrize(
    "body",
    [
        b'{"enforced_tok\\u0065ns": {"tokens": [{"token": "7"}]}}',
        b'{"enforced\\u005Ftokens": {"tokens": [{"token": "7"}]}}',
        json.dumps(tokens("7")).encode("utf-16"),
        json.dumps(tokens("7")).encode("utf-32"),
    ],
)
def test_however_json_writes_the_names_they_are_found(body: bytes) -> None:
    assert FIELDS.read(body) == Told(True, None, [7])


def test_a_name_said_twice_counts_as_vllm_reads_it() -> None:
    body = b'{"logprobs_mode": "processed", "logprobs_mode": "raw"}'
    assert FIELDS.read(body) == Told(True, RAW)


@pytest.mark.parametrize("body", [b'{"enforced_tokens": ', b'["enforced_tokens"]', b"[" * 100_000])
def test_what_vllm_cannot_read_is_left_to_it(body: bytes) -> None:
    assert FIELDS.read(body + b" " if body[:2] != b"[[" else body + b"enforced_str") is None


def test_more_tokens_than_the_context_has_judge_nobody() -> None:
    assert read(**tokens(*["7"] * 15)) == Told(True, None, [7] * 15)
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
    fields = NetworkFields(512, 16, Hasty(), PROCESSED)
    with pytest.raises(BadRequest, match="context of 16") as refused:
        fields.read(json.dumps(body).encode())
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
    assert read(**tokens("7"), **asked) == Told(True, None, [7], no_grammar)
