"""Compares another node's distances with this node's to detect fraud (protocol.md, section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

from poc_core.arithmetic.statistics import binomial_p_value
from poc_core.schemes.distance.options import FRAUD_THRESHOLD

# The probability that an honest pair is found invalid (section 3, Fraud).
P_INVALID = 5e-4


@dataclass(frozen=True)
class DistanceVerdict:
    """The verdict on claimed (nonce, distance) pairs: `n_invalid` of `n_total` are invalid."""

    n_total: int
    n_invalid: int
    probability_honest: float  # probability that an honest sender has at least n_invalid
    fraud_detected: bool


def judge_distances(
    received: Sequence[float],
    computed: Sequence[float | None],
    r_target: float,
    fraud_threshold: float = FRAUD_THRESHOLD,
) -> DistanceVerdict:
    """Compares another node's distances with this node's distances. Returns the verdict.

    `computed`: this node's distances of the same nonces; None for an excluded nonce, which does not
    count in n_total. ValueError if the lengths differ.
    """
    pairs = [(dist, own) for dist, own in zip(received, computed, strict=True) if own is not None]
    # `not <` instead of `>=`, so that NaN is invalid too.
    n_invalid = sum(not dist < r_target or not own <= r_target for dist, own in pairs)
    probability_honest = binomial_p_value(n_invalid, len(pairs), P_INVALID)
    return DistanceVerdict(
        n_total=len(pairs),
        n_invalid=n_invalid,
        probability_honest=probability_honest,
        fraud_detected=len(pairs) > 0 and probability_honest < fraud_threshold,
    )
