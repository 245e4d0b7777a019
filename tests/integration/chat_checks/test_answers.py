"""What answers of known tokens are like: those of the engine itself, with all that vLLM's server
makes of them."""

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.chat_client import CHAT, prompts
from tests.harness.marks import needs_vllm
from tests.harness.waiting import wait_until
from tests.integration.chat_checks.known import (
    CASES,
    MODES,
    SAME,
    Server,
    answers_alike,
    chat,
    content,
    furthest,
    ids_of,
    known,
    text_of,
)
from workers.engines.validations import Way

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),
    needs_vllm,
    pytest.mark.parametrize("server", [64], indirect=True, scope="session"),
]

_SCHEMA = {
    "type": "object",
    "properties": {"ready": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["ready", "n"],
    "additionalProperties": False,
}
_JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}


@pytest.mark.parametrize("way", ["pass", "steps"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.99},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 12},
        {
            "temperature": 1.1,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "bad_words": ["e"],
        },
    ],
    ids=str,
)
def test_an_answer_of_the_engine_itself_is_confirmed(
    server: Server, way: Way, mode: str, sampling: dict[str, Any]
) -> None:
    asked = chat(logprobs_mode=mode, **sampling)
    free = server.ask(asked)
    with server.scoring_by(way):
        answers_alike(free, server.ask(known(asked, ids_of(free))))


def steps_of(server: Server) -> float:
    """The steps with an answer's tokens that vLLM has counted itself."""
    (steps,) = [
        sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "vllm:iteration_tokens_total_count"
    ]
    return float(steps)


def test_a_pass_is_one_forward_and_no_step_for_each_token(server: Server) -> None:
    asked = chat(temperature=0, max_tokens=48, ignore_eos=True)
    ids = ids_of(server.ask(asked))
    took = dict[str, float]()
    ways: tuple[Way, ...] = ("pass", "steps")
    for way in ways:
        before = steps_of(server)
        with server.scoring_by(way):
            server.ask(known(asked, ids))
        server.ask(chat(max_tokens=1))  # whose counting follows that of the one before
        took[way] = steps_of(server) - before
    assert took["steps"] >= 48
    assert took["pass"] <= 4


@pytest.mark.parametrize("way", ["pass", "steps"])
def test_completions_are_scored_too(server: Server, way: Way) -> None:
    asked = {"prompt": "The sea", "max_tokens": 12, "logprobs": 5, "seed": 1, "temperature": 0.9}
    free = server.ask({**asked, "logprobs_mode": "raw_logprobs"}, "/v1/completions")
    (choice,) = free["choices"]
    ids = [int(one) for one in choice["logprobs"]["tokens"]]
    with server.scoring_by(way):
        body = known({**asked, "logprobs_mode": "raw_logprobs"}, ids)
        forced = server.ask(body, "/v1/completions")
    (found,) = forced["choices"]
    assert found["text"] == choice["text"]
    assert found["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
    expected = pytest.approx(choice["logprobs"]["token_logprobs"], abs=SAME)
    assert found["logprobs"]["token_logprobs"] == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_masks_known_tokens_as_it_masked_sampled_ones(server: Server, mode: str) -> None:
    asked = chat(logprobs_mode=mode, response_format=_JSON, max_tokens=60, temperature=0.9)
    free = server.ask(asked)
    with server.scoring_by("steps"):
        answers_alike(free, server.ask(known(asked, ids_of(free))))
    best = [entry["logprob"] for one in content(free) for entry in one["top_logprobs"]]
    assert -9999.0 in best  # the grammar left fewer than five


def test_a_token_that_a_grammar_refuses_ends_neither_the_answer_nor_the_engine(
    server: Server,
) -> None:
    asked = chat(response_format=_JSON, max_tokens=100, temperature=0.9, logprobs_mode=MODES[1])
    ids = ids_of(server.ask(asked))
    other = [*ids[:3], ids[0], *ids[3:]]  # a brace where none may be
    with server.scoring_by("steps"):
        answer = server.ask(known({**asked, "ignore_eos": True}, other))
        assert ids_of(answer) == other
        assert content(answer)[3]["logprob"] == -9999.0
        free_of_grammar = {name: one for name, one in asked.items() if name != "response_format"}
        plain = server.ask(known({**free_of_grammar, "ignore_eos": True}, other))
        assert furthest(content(plain)[4:], content(answer)[4:]) < SAME
    assert ids_of(server.ask(asked)) == ids


@pytest.mark.parametrize("way", ["pass", "steps"])
def test_a_stream_has_a_chunk_for_each_token(server: Server, way: Way) -> None:
    case = next(case for case in CASES if case["name"] == "temperature-0.7")
    with server.scoring_by(way):
        options = {"stream_options": {"include_usage": True}}
        chunks = server.stream({**case["request"], **options})
    told = [one["choices"][0] for one in chunks if one["choices"]]
    positions = [choice["logprobs"]["content"] for choice in told if choice.get("logprobs")]
    assert [len(one) for one in positions] == [1] * len(case["ids"])
    found = [one for (one,) in positions]
    assert furthest(case["expected"]["content"], found) < 2e-4
    assert told[-1]["finish_reason"] == case["expected"]["finish_reason"]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == len(case["ids"])


@pytest.mark.parametrize("way", ["pass", "steps"])
def test_two_choices_are_equal(server: Server, way: Way) -> None:
    asked = chat(temperature=0.9)
    ids = ids_of(server.ask(asked))
    with server.scoring_by(way):
        answer = server.ask(known({**asked, "n": 2}, ids))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert ids_of(answer) == ids_of(answer, 1) == ids
    assert furthest(content(answer), content(answer, 1)) == 0
    assert text_of(answer) == text_of(answer, 1)


@pytest.mark.parametrize("way", ["pass", "steps"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_inside_the_known_text_ends_the_answer(
    server: Server, way: Way, streams: bool
) -> None:
    asked = chat(temperature=0.9)
    free = server.ask(asked)
    stop = text_of(free)[8:11]
    expected = text_of(free).split(stop)[0]
    body = known({**asked, "stop": [stop]}, ids_of(free))
    with server.scoring_by(way):
        if streams:
            chunks = server.stream(body)
            choices = [one["choices"][0] for one in chunks if one["choices"]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            last = choices[-1]
        else:
            answer = server.ask(body)
            assert len(ids_of(answer)) < len(ids_of(free))
            assert answer["usage"]["completion_tokens"] == len(ids_of(answer))
            text, last = text_of(answer), answer["choices"][0]
    assert text == expected
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_the_prefix_cache_changes_no_number(server: Server) -> None:
    """The second answer finds the prompt there, the third the known tokens too."""
    asked = chat(prompts(1, 300, 300)[0], max_tokens=300, ignore_eos=True, temperature=0.99)
    ids = ids_of(server.ask({**asked, "cache_salt": "another"}))
    body = {**known(asked, ids), "cache_salt": "one"}
    with server.scoring_by("pass"):
        first, second = server.ask(body), server.ask(body)
        server.ask({**body, "max_tokens": 1, "messages": body["messages"]})
        third = server.ask(body)
    assert furthest(content(first), content(second)) < SAME
    assert furthest(content(first), content(third)) < SAME


@pytest.mark.parametrize("way", ["pass", "steps"])
def test_free_and_known_answers_of_both_modes_do_not_disturb_each_other(
    server: Server, way: Way
) -> None:
    texts = [f"Tell me about {thing}." for thing in ("the sea", "wind", "stones", "ships", "noon")]
    asked = [
        chat(text, logprobs_mode=mode, temperature=temperature)
        for (text, mode), temperature in zip(
            [(text, mode) for text in texts for mode in MODES],
            cycle([0, 0.9, 0.5]),
            strict=False,
        )
    ]
    # Greedy ones are decoded again beside the others: with a seed, a sampled one would depend on
    # who is there.
    alone = [server.ask(one) for one in asked]
    again = [
        known(one, ids_of(answer)) if one["temperature"] else one
        for one, answer in zip(asked, alone, strict=True)
    ]
    with server.scoring_by(way), ThreadPoolExecutor(len(again)) as pool:
        together = list(pool.map(server.ask, again))
    for one, other in zip(alone, together, strict=True):
        assert furthest(content(one), content(other)) < SAME


@pytest.mark.parametrize("way", ["pass", "steps"])
def test_a_known_tool_call_is_parsed(server: Server, way: Way) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    tools = [{"type": "function", "function": function}]
    asked = chat(max_tokens=200, tools=tools, tool_choice="auto", enforced_str=call)
    with server.scoring_by(way):
        answer = server.ask(asked)
    (choice,) = answer["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}


@pytest.mark.parametrize("way", ["pass", "steps"])
def test_an_end_inside_the_known_tokens_cuts_them_unless_it_is_ignored(
    server: Server, way: Way
) -> None:
    end, ids = 2, [40, 41, 42, 2, 43, 44]
    with server.scoring_by(way):
        cut = server.ask(known(chat(), ids))
        early = server.ask(known(chat(min_tokens=5), ids))
        whole = server.ask(known(chat(ignore_eos=True), ids))
    assert ids_of(cut) == ids[: ids.index(end) + 1]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert ids_of(early) == ids_of(whole) == ids
    assert whole["choices"][0]["finish_reason"] == "length"


def test_a_seed_and_a_prompt_of_several_steps_end_no_engine(server: Server) -> None:
    """On CPUs vLLM cannot draw back random numbers: the engine ended."""
    asked = chat(prompts(1, 300, 300)[0], temperature=0.9, max_tokens=4)
    assert len(ids_of(server.ask(asked))) == 4
    server.engine.check()


def test_a_client_that_leaves_frees_its_validation(server: Server) -> None:
    # Longer by far than the client waits.
    body = known(chat(max_tokens=1900, ignore_eos=True), [40 + n % 100 for n in range(1900)])
    patience = httpx.Timeout(60, read=0.2)
    with server.scoring_by("steps"):
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(CHAT, json={"model": server.model, **body}, timeout=patience)
        server.ask(known(chat(), [40, 41]))  # by steps too
    wait_until(lambda: server.engine.unfinished_chat() == 0, "what nobody waits for ends")
