"""Answers of known tokens as if they had been sampled: vLLM's own outputs, without an engine."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cli.shipped import shipped_models
from tests.harness.marks import needs_vllm
from workers.vllm.release.extra_args import TOKEN_IDS

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM

END = 2
TOKENS = [41, 78, 75, 16, 42, 71, 278, 81, 321, 14, 223, 86]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shipped_models()["tiny-qwen3"])


def made(
    tokenizer: Any,
    tokens: list[int],
    streams: bool = False,
    ids: bool = True,
    max_model_len: int = 2048,
    **asked: Any,
) -> Any:
    """The answer's own tokens, and its outputs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest

    from workers.vllm.release.answers import Answer, Rows

    params = SamplingParams(
        output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
        extra_args={TOKEN_IDS: 1} if ids else None,
        **{"max_tokens": 100, "logprobs": 2, **asked},
    )
    params.update_from_generation_config({}, END)
    request = EngineCoreRequest("a", [1, 2, 3], None, params, None, 0.0, None, None, None)
    request.external_req_id = "a"
    llm = SimpleNamespace(
        output_processor=SimpleNamespace(tokenizer=tokenizer),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )
    answer = Answer(llm, request, None, tokens)
    n = len(answer.tokens)
    best = np.array([[token, 300, 301] for token in answer.tokens])
    logprobs = np.tile(np.array([-3.0, -1.0, -2.0], dtype=np.float32), (n, 1))
    rows = Rows(best, logprobs, np.full(n, 9))
    return answer.tokens, [one for part in answer.outputs(rows) for one in part]


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "text"])
def test_a_whole_answer_is_one_output(tokenizer: Any, ids: bool) -> None:
    tokens, (output,) = made(tokenizer, TOKENS, ids=ids)
    (choice,) = output.outputs
    assert tokens == list(choice.token_ids) == TOKENS
    assert choice.text == tokenizer.decode(TOKENS)
    assert (choice.finish_reason, choice.stop_reason, output.finished) == ("length", None, True)
    for token, position in zip(TOKENS, choice.logprobs, strict=True):
        assert {one: (told.logprob, told.rank) for one, told in position.items()} == {
            token: (-3.0, 9),
            300: (-1.0, 1),
            301: (-2.0, 2),
        }
        assert next(iter(position)) == token
        names = [told.decoded_token for told in position.values()]
        expected = map(str, position) if ids else [tokenizer.decode([one]) for one in position]
        assert names == list(expected)
    assert choice.cumulative_logprob == pytest.approx(-3.0 * len(TOKENS))


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "text"])
def test_a_streamed_one_is_an_output_for_each_token(tokenizer: Any, ids: bool) -> None:
    _tokens, outputs = made(tokenizer, TOKENS, streams=True, ids=ids)
    choices = [output.outputs[0] for output in outputs]
    assert [list(choice.token_ids) for choice in choices] == [[token] for token in TOKENS]
    assert [[*one] for choice in choices for one in choice.logprobs] == [
        [token, 300, 301] for token in TOKENS
    ]
    assert "".join(choice.text for choice in choices) == tokenizer.decode(TOKENS)
    assert [choice.finish_reason for choice in choices] == [None] * 11 + ["length"]


def test_answers_longer_than_what_is_made_at_a_time_lose_nothing(tokenizer: Any) -> None:
    tokens, (output,) = made(tokenizer, TOKENS * 60, max_tokens=1000)
    assert list(output.outputs[0].token_ids) == tokens == TOKENS * 60
    assert [next(iter(one)) for one in output.outputs[0].logprobs] == tokens


@pytest.mark.parametrize(
    ("asked", "n_tokens", "reason"),
    [
        ({}, 6, "stop"),
        ({"min_tokens": 7}, 9, "length"),
        ({"ignore_eos": True}, 9, "length"),
        ({"max_tokens": 4}, 4, "length"),
        ({"ignore_eos": True, "stop_token_ids": [71]}, 8, "stop"),
    ],
    ids=str,
)
def test_the_engines_rules_end_it(
    tokenizer: Any, asked: dict[str, Any], n_tokens: int, reason: str
) -> None:
    known = [*TOKENS[:5], END, 42, 71, 278]
    tokens, (output,) = made(tokenizer, known, **asked)
    (choice,) = output.outputs
    assert tokens == list(choice.token_ids) == known[:n_tokens]
    assert choice.finish_reason == reason
    assert choice.stop_reason == (71 if "stop_token_ids" in asked else None)


def test_no_room_ends_it(tokenizer: Any) -> None:
    tokens, (output,) = made(tokenizer, TOKENS, max_model_len=3 + 5)
    assert tokens == list(output.outputs[0].token_ids) == TOKENS[:5]
    assert output.outputs[0].finish_reason == "length"


def test_a_pass_tells_its_rows_as_they_came(tokenizer: Any) -> None:
    import torch
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor

    from tests.unit.workers.vllm.chat.test_rows import PLAIN
    from workers.vllm.release import answers

    params = answers.pass_params(PLAIN.n_best, PLAIN.packed(), skip_cache=False)
    request = EngineCoreRequest("a", [1, 2, 3], None, params, None, 0.0, None, None, None)
    request.external_req_id = "a"
    processor = OutputProcessor(tokenizer, log_stats=False)
    processor.add_request(request, None)
    answers.shape_logprobs(processor, request)
    ids, logprobs, ranks = torch.tensor([[4, 5]]), torch.tensor([[-2.0, -1.0]]), torch.tensor([7])
    told = EngineCoreOutput(
        "a",
        [0],
        new_prompt_logprobs_tensors=answers.prompt_logprobs(ids.int(), logprobs, ranks.int()),
        finish_reason=FinishReason.LENGTH,
    )
    (output,) = processor.process_outputs([told]).request_outputs
    for part, expected in zip(output.prompt_logprobs.parts(), (ids, logprobs, ranks), strict=True):
        assert part.tolist() == expected.tolist()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_ends_it_too(tokenizer: Any, streams: bool) -> None:
    text = tokenizer.decode(TOKENS)
    stop = text[4:7]
    _tokens, outputs = made(tokenizer, TOKENS, streams=streams, stop=[stop])
    choices = [output.outputs[0] for output in outputs]
    assert "".join(choice.text for choice in choices) == text.split(stop)[0]
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)
    said = sum(len(choice.token_ids) for choice in choices)
    assert said == sum(len(choice.logprobs) for choice in choices) < len(TOKENS)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_several_choices_are_alike(tokenizer: Any, streams: bool) -> None:
    _tokens, outputs = made(tokenizer, TOKENS, streams=streams, n=2)
    texts = ["", ""]
    for output in outputs:
        for choice in output.outputs:
            texts[choice.index] += choice.text
    assert texts == [tokenizer.decode(TOKENS)] * 2
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_logprobs_come_where_they_are_asked_for(tokenizer: Any) -> None:
    _tokens, (output,) = made(tokenizer, TOKENS, logprobs=None)
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].text == tokenizer.decode(TOKENS)


ZEROS = [5] * 60 + [6]
REPEATING: list[tuple[list[int], dict[str, int], int]] = [
    ([9, 7, 8, 7, 8, 7, 8, 7], {"max_pattern_size": 2, "min_count": 3}, 7),
    ([9, 7, 8, 7, 8, 7, 8, 7], {"max_pattern_size": 1, "min_count": 2}, 8),
    ([9, 7, 7, 7, 7, 7, 7], {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2}, 5),
    (ZEROS * 2, {"max_pattern_size": 61, "min_pattern_size": 31, "min_count": 2}, 122),
    (ZEROS * 3, {"max_pattern_size": 60, "min_pattern_size": 31, "min_count": 2}, 183),
]


@pytest.mark.parametrize(("tokens", "asked", "n"), REPEATING)
def test_a_repetition_that_ends_the_answer_ends_it_as_in_vllm(
    tokenizer: Any, tokens: list[int], asked: dict[str, int], n: int
) -> None:
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.core.sched.utils import check_sequence_repetition

    detection = RepetitionDetectionParams(**asked)
    ended, _outputs = made(tokenizer, tokens, max_tokens=500, repetition_detection=detection)
    assert len(ended) == n
    ends = [at for at in range(1, n) if check_sequence_repetition(tokens[:at], detection)]
    assert ends == []


def test_repetitions_are_sought_in_many_tokens_without_a_long_pause(tokenizer: Any) -> None:
    """vLLM's own search would take half an hour."""
    from vllm.sampling_params import RepetitionDetectionParams

    detection = RepetitionDetectionParams(180, 91, 2)
    tokens = ([5] * 180 + [6]) * 300
    asked: dict[str, Any] = {"max_model_len": 10**6, "max_tokens": 10**6, "logprobs": None}
    began = time.process_time()
    ended, _outputs = made(tokenizer, tokens, repetition_detection=detection, **asked)
    assert ended == tokens
    assert time.process_time() - began < 60
