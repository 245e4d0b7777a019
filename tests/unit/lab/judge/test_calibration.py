from typing import Any

import numpy as np
import pytest

from lab.judge.calibration import (
    CalibrationError,
    calibrate,
    check_count,
    expected_spread,
    r_target_for,
)


def normal_blocks(means: list[float], n: int = 2000) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.normal(mean, 0.008, n) for mean in means]


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.58, 0.999])
def test_the_wanted_share_lies_below_the_r_target(rate: float) -> None:
    distances = np.sort(normal_blocks([1.414], 1000)[0])
    assert np.mean(distances < r_target_for(distances, rate)) == pytest.approx(rate, abs=1e-12)


def test_an_r_target_keeps_away_from_its_neighbours() -> None:
    assert r_target_for(np.array([1.0, 1.2, 1.6, 1.9]), 0.5) == pytest.approx(1.4)


def test_the_rate_holds_for_all_block_hashes_together_and_each_has_its_own() -> None:
    blocks = [np.array([1.0, 1.1, 1.2, 1.3]), np.array([1.15, 1.25, 1.35, 1.45])]
    (target,) = calibrate(blocks, [0.5]).targets
    assert target.wanted_rate == target.valid_rate == 0.5
    assert target.r_target == pytest.approx(1.225)
    assert target.block_rates == [0.75, 0.25]
    assert target.rate_spread == 0.5
    assert target.rate_std == pytest.approx(np.std([0.75, 0.25], ddof=1))
    assert target.block_r_targets == pytest.approx([1.15, 1.3])
    assert target.r_target_spread == pytest.approx(0.15)
    assert target.r_target_std == pytest.approx(np.std([1.15, 1.3], ddof=1))


def test_the_distribution_is_that_of_all_distances() -> None:
    found = calibrate([np.array([1.5, 1.0]), np.array([2.0])], [], [1.4])
    assert (found.n, found.mean, found.lowest, found.highest) == (3, 1.5, 1.0, 2.0)
    assert found.std == pytest.approx(np.std([1.0, 1.5, 2.0]))
    assert (found.block_means, found.block_stds) == ([1.25, 2.0], [0.25, 0.0])


def test_a_given_r_target_is_kept_and_its_rate_found() -> None:
    first, second = calibrate(normal_blocks([1.414, 1.414]), [0.1], [1.414]).targets
    assert first.valid_rate == pytest.approx(0.1)
    assert (second.wanted_rate, second.r_target) == (None, 1.414)
    assert second.valid_rate == pytest.approx(0.5, abs=0.02)


def test_a_distance_equal_to_r_target_is_not_valid() -> None:
    assert calibrate([np.array([1.0, 1.4, 1.5])], [], [1.4]).targets[0].valid_rate == pytest.approx(
        1 / 3
    )


@pytest.mark.parametrize(("r_target", "rate"), [(0.5, 0.0), (1.9, 1.0)])
def test_where_all_or_none_are_valid_no_block_hash_has_an_r_target_of_its_own(
    r_target: float, rate: float
) -> None:
    (target,) = calibrate(normal_blocks([1.414, 1.414]), [], [r_target]).targets
    assert (target.valid_rate, target.rate_spread, target.counting_std, target.borderline) == (
        rate,
        0.0,
        0.0,
        0.0,
    )
    assert (target.block_r_targets, target.r_target_spread, target.r_target_std) == (
        None,
        None,
        None,
    )


def test_one_block_hash_has_no_spread() -> None:
    (target,) = calibrate(normal_blocks([1.414]), [0.1]).targets
    assert (
        target.rate_spread,
        target.rate_std,
        target.counting_spread,
        target.r_target_spread,
    ) == (None,) * 4
    assert target.block_r_targets is not None
    assert len(target.block_r_targets) == 1


def test_block_hashes_that_are_alike_are_spread_as_counting_explains() -> None:
    (target,) = calibrate(normal_blocks([1.414] * 100), [0.1]).targets
    assert target.counting_std == pytest.approx((0.1 * 0.9 / 2000) ** 0.5, rel=1e-3)
    assert target.rate_std == pytest.approx(target.counting_std, rel=0.25)
    assert target.rate_spread == pytest.approx(target.counting_spread, rel=0.25)


def test_block_hashes_that_differ_are_spread_further_than_counting_explains() -> None:
    (target,) = calibrate(normal_blocks([1.413, 1.414, 1.415]), [0.5]).targets
    assert target.rate_spread is not None
    assert target.counting_spread is not None
    assert target.rate_spread > 3 * target.counting_spread
    assert target.r_target_spread == pytest.approx(0.002, rel=0.25)


@pytest.mark.parametrize(
    ("n", "spread"), [(2, 1.12838), (3, 1.69257), (8, 2.84720), (100, 5.01519)]
)
def test_the_expected_spread_is_that_of_statistical_tables(n: int, spread: float) -> None:
    assert expected_spread(n) == pytest.approx(spread, abs=1e-4)


def test_borderline_nonces_are_valid_by_less_than_a_ten_thousandth() -> None:
    below, near, above = [1.39] * 3, [1.39995], [1.40005] * 5
    assert calibrate([np.array(above + near + below)], [], [1.4]).targets[0].borderline == 0.25


def test_the_callers_distances_are_not_sorted_in_place() -> None:
    distances = np.array([1.5, 1.4, 1.6])
    calibrate([distances], [0.5])
    assert distances.tolist() == [1.5, 1.4, 1.6]


@pytest.mark.parametrize(
    ("n", "rate", "least"), [(4, 0.1, 10), (99, 0.001, 1000), (5, 0.95, 20), (1, 0.5, 2)]
)
def test_too_few_nonces_for_a_rate_are_refused_with_how_many_it_takes(
    n: int, rate: float, least: int
) -> None:
    with pytest.raises(CalibrationError, match=f"take {least} or more"):
        check_count(n, rate)
    check_count(least, rate)
    with pytest.raises(CalibrationError, match="cannot show"):
        calibrate([np.linspace(1.3, 1.5, n)], [rate])


@pytest.mark.parametrize("blocks", [[], [np.array([])], [np.array([1.4]), np.array([])]])
def test_a_block_hash_without_distances_is_refused(blocks: Any) -> None:
    with pytest.raises(CalibrationError, match="has no distance"):
        calibrate(blocks, [0.1])
