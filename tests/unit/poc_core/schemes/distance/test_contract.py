from typing import Any

import pytest

from poc_core.schemes.distance.contract import CONTRACT, judge_distances


def test_honest_distances_are_no_fraud() -> None:
    verdict = judge_distances([1.39, 1.40], [1.3901, 1.3999], r_target=1.405)
    assert (verdict.n_total, verdict.n_invalid, verdict.probability_honest) == (2, 0, 1.0)
    assert not verdict.fraud_detected


@pytest.mark.parametrize(
    ("received", "computed", "n_invalid"),
    [
        (1.5, 1.0, 1),  # claimed at r_target
        (1.0, 1.5, 0),  # computed at r_target is still good
        (1.0, 1.5001, 1),
        (float("nan"), 1.0, 1),
    ],
)
def test_what_makes_a_distance_invalid(received: Any, computed: float, n_invalid: int) -> None:
    assert judge_distances([received], [computed], r_target=1.5).n_invalid == n_invalid


def test_one_invalid_distance_of_one_is_a_fraud() -> None:
    verdict = judge_distances([1.0], [1.6], r_target=1.5)
    assert verdict.probability_honest == pytest.approx(5e-4)
    assert verdict.fraud_detected


def test_a_probability_at_the_threshold_is_no_fraud() -> None:
    probability = judge_distances([1.0], [1.6], r_target=1.5).probability_honest
    for threshold, is_fraud in ((probability, False), (probability * 1.001, True)):
        verdict = judge_distances([1.0], [1.6], r_target=1.5, fraud_threshold=threshold)
        assert verdict.fraud_detected is is_fraud


def test_no_distances_are_no_fraud() -> None:
    verdict = judge_distances([], [], r_target=1.4)
    assert (verdict.n_total, verdict.probability_honest, verdict.fraud_detected) == (0, 1.0, False)


def test_excluded_distances_are_not_judged() -> None:
    verdict = judge_distances([1.6, 1.0], [None, 1.0], r_target=1.5)
    assert (verdict.n_total, verdict.n_invalid) == (1, 0)


@pytest.mark.parametrize(("distance", "is_valid"), [(1.4999, True), (1.5, False), (None, False)])
def test_a_nonce_is_reported_whose_distance_is_below_r_target(
    distance: float | None, is_valid: bool
) -> None:
    assert CONTRACT.is_reported(distance, {"r_target": 1.5}) is is_valid
