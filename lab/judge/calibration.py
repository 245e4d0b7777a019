"""Finds the r_target with which a wanted share of nonces is valid, and how much it varies between
block hashes.

A nonce is valid if its distance is below r_target (protocol.md, section 3). Valid rates are shares
from 0 to 1. Each block hash has one array of distances, float64 (n,).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poc_core.errors import ProoflineError

# Difference of a distance between devices or dtypes (mean difference of the golden data's bfloat16
# distances between H200 and CPU: 0.00008): a nonce this close to r_target may be valid on one
# device and invalid on another.
BORDERLINE = 1e-4


class CalibrationError(ProoflineError):
    """No r_target or valid rate can be found from these distances."""


@dataclass(frozen=True)
class Target:
    """One r_target with its valid rate, for all block hashes together and for each of them.

    A spread is the highest minus the lowest value among block hashes; None if there is only one.
    """

    wanted_rate: float | None  # None if the r_target was given
    r_target: float
    valid_rate: float  # of all block hashes together
    block_rates: list[float]
    rate_spread: float | None
    rate_std: float | None
    # Spread that the finite number of nonces explains by itself.
    counting_spread: float | None
    counting_std: float
    # The r_target that gives each block hash alone the valid_rate; None if the rate is too close to
    # 0 or 1.
    block_r_targets: list[float] | None
    r_target_spread: float | None
    r_target_std: float | None
    # Share of the valid nonces whose distance is less than BORDERLINE below r_target.
    borderline: float


@dataclass(frozen=True)
class Calibration:
    """The distribution of the n distances of all block hashes together, and the r_targets found."""

    n: int
    mean: float
    std: float
    lowest: float
    highest: float
    block_means: list[float]
    block_stds: list[float]
    targets: list[Target]


def calibrate(
    blocks: Sequence[np.ndarray], rates: Sequence[float], r_targets: Sequence[float] = ()
) -> Calibration:
    """Finds an r_target for each of the valid `rates`, and the valid rate for each of `r_targets`.

    `blocks`: the distances (n,) of each block hash. Raises CalibrationError if a block hash has no
    distances, or if there are too few distances for a rate.
    """
    if not blocks or any(len(block) == 0 for block in blocks):
        raise CalibrationError("A block hash has no distance; is the model's output finite?")
    blocks = [np.sort(np.asarray(block, np.float64)) for block in blocks]
    together = np.sort(np.concatenate(blocks))
    targets = [_target(blocks, together, r_target_for(together, rate), rate) for rate in rates]
    targets += [_target(blocks, together, r_target, None) for r_target in r_targets]
    return Calibration(
        n=len(together),
        mean=float(together.mean()),
        std=float(together.std()),
        lowest=float(together[0]),
        highest=float(together[-1]),
        block_means=[float(block.mean()) for block in blocks],
        block_stds=[float(block.std()) for block in blocks],
        targets=targets,
    )


def check_count(n: int, rate: float) -> None:
    """Raises CalibrationError if n nonces are too few for a valid rate of `rate`: rounded to whole
    nonces, none or all of them would be valid.
    """
    if not _count_shows(n, rate):
        least = math.ceil(1 / min(rate, 1 - rate))
        raise CalibrationError(
            f"{n} nonces cannot show a valid rate of {rate:g}; take {least} or more."
        )


def r_target_for(distances: np.ndarray, rate: float) -> float:
    """Returns the r_target for which the share `rate` of the nonces is valid, rounded to a whole
    number of nonces.

    `distances` (n,) must be sorted. The r_target lies half-way between two neighbouring distances,
    so that rounding errors in distances do not make nonces valid or invalid.
    """
    check_count(len(distances), rate)
    k = round(rate * len(distances))
    return float(distances[k - 1 : k + 1].mean())


def expected_spread(n: int) -> float:
    """Returns the expected difference between the highest and the lowest of n >= 2 independent
    standard normal numbers.
    """
    x = np.linspace(-8, 8, 3201)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    return float(np.trapezoid(1 - below**n - (1 - below) ** n, x))


def _count_shows(n: int, rate: float) -> bool:
    return 1 <= round(rate * n) <= n - 1


def _target(
    blocks: Sequence[np.ndarray], together: np.ndarray, r_target: float, wanted: float | None
) -> Target:
    rates = [float(np.mean(block < r_target)) for block in blocks]
    rate = float(np.mean(together < r_target))
    counting_std = math.sqrt(rate * (1 - rate) * len(blocks) / len(together))
    several = len(blocks) > 1
    enough = all(_count_shows(len(block), rate) for block in blocks)
    own = [r_target_for(block, rate) for block in blocks] if enough else None
    return Target(
        wanted_rate=wanted,
        r_target=r_target,
        valid_rate=rate,
        block_rates=rates,
        rate_spread=_spread(rates),
        rate_std=_std(rates),
        counting_spread=expected_spread(len(blocks)) * counting_std if several else None,
        counting_std=counting_std,
        block_r_targets=own,
        r_target_spread=_spread(own) if own else None,
        r_target_std=_std(own) if own else None,
        borderline=(
            float(np.mean(together[together < r_target] >= r_target - BORDERLINE)) if rate else 0.0
        ),
    )


def _spread(numbers: Sequence[float]) -> float | None:
    return max(numbers) - min(numbers) if len(numbers) > 1 else None


def _std(numbers: Sequence[float]) -> float | None:
    """Returns the sample standard deviation (n - 1 in the denominator); None for a single
    number.
    """
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
