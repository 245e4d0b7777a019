from typing import Any

import pytest

from poc_core.arithmetic.statistics import binomial_p_value
from tests.harness.golden import PRIMITIVES


@pytest.mark.parametrize(
    "case", PRIMITIVES["binomial_p_values"], ids=lambda c: f"{c['n_mismatch']}of{c['n_total']}"
)
def test_p_value_is_the_references(case: Any) -> None:
    assert binomial_p_value(
        case["n_mismatch"], case["n_total"], case["p_mismatch"]
    ) == pytest.approx(case["p_value"], rel=1e-12)


def test_nothing_tested_proves_nothing() -> None:
    assert binomial_p_value(0, 0, 0.001) == 1.0


@pytest.mark.parametrize(("p_wrong", "p_value"), [(0.0, 0.0), (1.0, 1.0)])
def test_certainties(p_wrong: float, p_value: float) -> None:
    assert binomial_p_value(1, 3, p_wrong) == p_value
