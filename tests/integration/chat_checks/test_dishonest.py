"""Executors that are honest are valid by the network's comparison, those that are not are not."""

import pytest

from bench.executors import DISHONEST, HONEST, Judged, judge_all
from tests.harness.marks import needs_vllm

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),
    needs_vllm,
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, forked_engines: None) -> dict[str, Judged]:
    return {one.executor: one for one in judge_all(tmp_path_factory.mktemp("models"))}


@pytest.mark.parametrize("executor", HONEST)
def test_honest_executors_are_valid(judged: dict[str, Judged], executor: str) -> None:
    assert all(one.is_valid for one in judged[executor].verdicts)
    assert max(judged[executor].distances) < 0.04


@pytest.mark.parametrize("executor", DISHONEST)
def test_dishonest_executors_are_invalid(judged: dict[str, Judged], executor: str) -> None:
    assert not any(one.is_valid for one in judged[executor].verdicts)
    # by the mean alone too, whatever a few positions say
    assert max(judged[executor].similarities) < 0.9
