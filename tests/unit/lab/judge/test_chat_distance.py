"""The network's comparison of two chats, against its own examples."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lab.judge import chat_distance
from lab.judge.chat_distance import Rules, compare
from poc_core.serving.position_distance import position_distance

DATA = Path(__file__).parents[3] / "data" / "validation" / "distance.json"
EXAMPLES: list[dict[str, Any]] = json.loads(DATA.read_text())["examples"]


def position(token: str, logprob: float, **others: float) -> dict[str, Any]:
    best = {token: logprob} | others
    top = [{"token": name, "logprob": number} for name, number in best.items()]
    return {"token": token, "logprob": logprob, "top_logprobs": top}


def rules(**changes: Any) -> Rules:
    return Rules(**{"threshold": 0.9, **changes})


@pytest.mark.parametrize("example", EXAMPLES, ids=[one["name"] for one in EXAMPLES])
def test_the_networks_examples_to_the_last_digit(example: dict[str, Any]) -> None:
    found = compare(
        example["original"],
        example["validation"],
        rules(
            threshold=example["threshold"],
            processed=example["mode"] == "processed_logprobs",
            calibrated=example["how"].get("enforced_model", True),
        ),
    )

    def rounded(number: float | None) -> float | None:
        return None if number is None else round(number, 9)

    assert [rounded(one) for one in found.distances] == example["positions"]
    assert rounded(found.legacy_similarity) == example["legacy_similarity"]
    assert rounded(found.similarity) == example["similarity"]
    assert found.reason == example["reason"]


def test_a_number_that_is_none_counts_as_far_as_can_be() -> None:
    assert position_distance({"1": -math.inf, "2": -1.0}, {"1": -1.0, "2": -1.0}) == 0.25
    assert position_distance({"1": -1.0}, {"1": math.nan}) == 0.5
    assert position_distance({}, {"1": -1.0}) == 0.5


def test_entries_beyond_the_validators_width_do_not_count() -> None:
    wide = {"1": -1.0, "2": -2.0, "3": -50.0}
    assert position_distance(wide, {"1": -1.0, "9": -3.0}) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("n", "distance"), [(100, 1 / 6), (25, 1 / 6 - 0.10 / 5), (1, 1 / 6 - 0.10)]
)
def test_an_answer_that_is_too_far_is_invalid(n: int, distance: float) -> None:
    executor, validator = [position("1", -1.0)] * n, [position("1", -2.0)] * n
    far = compare(executor, validator, rules(threshold=0.95, calibrated=False))
    assert far.similarity == pytest.approx(1 - distance)
    assert (far.is_valid, far.reason) == (False, chat_distance.TOO_FAR)


@pytest.mark.parametrize(
    ("processed", "n", "most"), [(True, 100, 3), (True, 200, 4), (False, 100, 2), (False, 49, 0)]
)
def test_a_few_positions_may_be_far_of_models_with_calibration(
    processed: bool, n: int, most: int
) -> None:
    near, far = position("1", -1.0), position("1", -5.0)

    def reason(n_far: int) -> str:
        validator = [far] * n_far + [near] * (n - n_far)
        return compare([near] * n, validator, rules(threshold=0.1, processed=processed)).reason

    assert reason(most) == chat_distance.PASS
    assert reason(most + 1) == chat_distance.FAR_POSITIONS


@pytest.mark.parametrize(("narrow", "n", "most"), [(False, 10, 1), (False, 101, 4), (True, 10, 5)])
def test_a_few_tokens_may_be_outside_what_the_sampler_gives(
    narrow: bool, n: int, most: int
) -> None:
    never, near = position("1", -9999.0), position("1", -1.0)

    def reason(n_never: int) -> str:
        content = [never] * n_never + [near] * (n - n_never)
        return compare(content, content, rules(narrow=narrow)).reason

    assert reason(most) == chat_distance.PASS
    assert reason(most + 1) == chat_distance.OUTSIDE_SUPPORT


def test_an_empty_answer_has_nothing_to_be_judged_by() -> None:
    assert compare([], [], rules()).is_valid


def test_claimed_tokens_may_be_three_more() -> None:
    counted = {"prompt_tokens": 10, "completion_tokens": 20}
    assert not chat_distance.claims_too_much(
        {"prompt_tokens": 13, "completion_tokens": 23}, counted
    )
    assert chat_distance.claims_too_much({"prompt_tokens": 10, "completion_tokens": 24}, counted)
    assert chat_distance.claims_too_much({"prompt_tokens": 14, "completion_tokens": 2}, counted)


@pytest.mark.parametrize(
    ("model", "threshold", "calibrated"),
    [
        ("zai-org/GLM-5.3-Flash", 0.951, True),
        ("MiniMaxAI/MiniMax-M2.7", 0.922, False),
        ("deepseek-ai/DeepSeek-V4-Flash-0731", 0.900, True),
        ("/models/Kimi-K2.6", 0.900, False),
        ("zai-org/GLM-5.2-FP8", 0.750, False),
        ("tiny-qwen3", 0.900, False),
    ],
)
def test_the_models_rules(model: str, threshold: float, calibrated: bool) -> None:
    found = Rules.of(model, {}, "processed_logprobs")
    assert (found.threshold, found.calibrated, found.processed) == (threshold, calibrated, True)
    assert not Rules.of(model, {}, "raw_logprobs").processed


@pytest.mark.parametrize(
    ("request_", "narrow"),
    [
        ({}, False),
        ({"top_k": 40, "top_p": 0.95, "min_p": 0.0}, False),
        ({"top_k": 0}, False),
        ({"top_k": -1}, False),
        ({"top_k": 39}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.01}, True),
        ({"top_k": None, "top_p": None, "min_p": None}, False),
        ({"top_k": "few"}, False),
    ],
)
def test_which_samplers_are_narrow(request_: dict[str, Any], narrow: bool) -> None:
    assert chat_distance.is_narrow(request_) is narrow


def told(**changed: Any) -> dict[str, Any]:
    best = [{"token": str(9 + n), "logprob": -0.5 - n} for n in range(5)]
    usual = {"token": "9", "logprob": -0.5, "top_logprobs": best, "bytes": [57]}
    return usual | changed


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, None),
        ({"bytes": None}, None),
        ({"bytes": []}, None),
        ({"token": "nine"}, chat_distance.NOT_IDS),
        ({"token": "token_id:9"}, chat_distance.NOT_IDS),
        ({"top_logprobs": told()["top_logprobs"][:4]}, chat_distance.TOO_FEW),
        ({"logprob": -0.25}, chat_distance.NOT_ITS_OWN),
        ({"token": "8"}, chat_distance.NOT_ITS_OWN),
        ({"bytes": [56]}, chat_distance.MISSPELT),
    ],
)
def test_what_no_executor_may_answer_is_named(changed: dict[str, Any], fault: str | None) -> None:
    assert chat_distance.malformed([told(), told(**changed)]) == fault
