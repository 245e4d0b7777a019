"""Known tokens where two ranks compute the model, and in bfloat16."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.harness.marks import needs_vllm
from tests.integration.chat_checks.known import (
    CASES,
    MODES,
    Server,
    body_of,
    content,
    distances,
    furthest,
    ids_of,
    known,
    served,
)
from tests.stacks.deployments import QWEN3, Deployment
from workers.engines.validations import Way

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),
    needs_vllm,
    pytest.mark.slow,
]

RANKS = [Deployment("tiny-qwen3", "float32", 2), Deployment("tiny-qwen3", "float32", 1, 2)]
BFLOAT16 = Deployment("tiny-qwen3-256", "bfloat16")
ways = pytest.mark.parametrize("way", ["pass", "steps"])


def together(server: Server, bodies: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(server.ask, bodies))


@pytest.mark.parametrize("deployed", RANKS, indirect=True, ids=str, scope="session")
@ways
def test_two_ranks_give_the_golden_numbers(deployed: Server, way: Way) -> None:
    with deployed.scoring_by(way):
        answers = together(deployed, list(map(body_of, CASES)), 8)
    for case, answer in zip(CASES, answers, strict=True):
        assert furthest(case["expected"]["content"], content(answer)) < 2e-4
        assert answer["choices"][0]["finish_reason"] == case["expected"]["finish_reason"]


def test_known_reasoning_is_parsed(forked_engines: None) -> None:
    text = "Here is my thought process: it is a city. Here is my response: Paris."
    asked = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 200}
    with served(QWEN3, 256, "--reasoning-parser", "granite") as server:
        for way in ("pass", "steps"):
            with server.scoring_by(way):
                answer = server.ask({**asked, "enforced_str": text})
            message = answer["choices"][0]["message"]
            assert message["content"].strip() == "Paris."
            assert message["reasoning"].strip() == "it is a city."


@pytest.mark.parametrize("deployed", [BFLOAT16], indirect=True, ids=str, scope="session")
@ways
@pytest.mark.parametrize("n_executed", [1, 8])
def test_bfloat16_lies_near_whatever_the_batch(deployed: Server, way: Way, n_executed: int) -> None:
    asked = [
        {
            "messages": [{"role": "user", "content": f"Tell me about {n} ships."}],
            "max_tokens": 128,
            "ignore_eos": True,
            "temperature": 0.99,
            "logprobs": True,
            "top_logprobs": 5,
            "logprobs_mode": mode,
            "cache_salt": f"{n}",
        }
        for n, mode in enumerate(MODES * 4)
    ]
    executed = together(deployed, asked, n_executed)
    again = [known(body, ids_of(answer)) for body, answer in zip(asked, executed, strict=True)]
    with deployed.scoring_by(way):
        validated = together(deployed, again, 1)
    for one, other in zip(executed, validated, strict=True):
        assert np.mean(distances(content(one), content(other))) < 0.02
