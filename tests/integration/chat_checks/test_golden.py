"""Known tokens against golden data of transformers and numpy: by one forward, and by decode
steps."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.harness.marks import needs_vllm
from tests.integration.chat_checks.known import (
    CASES,
    ENFORCED_STR,
    Server,
    body_of,
    content,
    furthest,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),
    needs_vllm,
    pytest.mark.parametrize(
        "server", [64, pytest.param(256, marks=pytest.mark.slow)], indirect=True, scope="session"
    ),
]

# The sampler's roundings in float32 differ by 1e-5 at most.
_NEAR = 2e-4


@pytest.fixture(params=["pass", "steps"])
def scored_by(server: Server, request: pytest.FixtureRequest) -> Any:
    with server.scoring_by(request.param):
        yield request.param


def check(case: dict[str, Any], answer: dict[str, Any]) -> None:
    expected = case["expected"]
    assert furthest(expected["content"], content(answer)) < _NEAR
    assert answer["choices"][0]["finish_reason"] == expected["finish_reason"]
    assert {name: answer["usage"][name] for name in expected["usage"]} == expected["usage"]


@pytest.mark.usefixtures("scored_by")
def test_each_case_alone(server: Server) -> None:
    for case in CASES:
        check(case, server.ask(body_of(case)))


@pytest.mark.usefixtures("scored_by")
def test_thirty_at_once_of_both_modes(server: Server) -> None:
    cases = (CASES + CASES)[:30]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(server.ask, map(body_of, cases)))
    for case, answer in zip(cases, answers, strict=True):
        check(case, answer)


@pytest.mark.usefixtures("scored_by")
def test_a_known_text(server: Server) -> None:
    expected = ENFORCED_STR["expected"]["content"]
    answer = server.ask(ENFORCED_STR["request"])
    assert furthest(expected, content(answer)[: len(expected)]) < _NEAR
