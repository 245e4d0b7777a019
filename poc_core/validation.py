"""Holding another node's proofs against one's own: which differ, and is it fraud (protocol.md, sections 2 and 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from poc_core.encoding import decode_vector
from poc_core.errors import VectorError
from poc_core.statistics import binomial_p_value

# Section 2, Validation: the defaults of a client that sends no stat_test.
DIST_THRESHOLD = 0.02
P_MISMATCH = 0.001
FRAUD_THRESHOLD = 0.01
# Section 3, Fraud: how often an honest pair is found invalid.
P_INVALID = 5e-4


@dataclass(frozen=True)
class ArtifactVerdict:
    """Of `n_total` compared nonces `n_mismatch` differ. `n_excluded` further ones this node could not compute."""

    n_total: int
    n_mismatch: int
    mismatch_nonces: list[int]  # in the order of the computed ones
    p_value: float  # how likely an honest sender has that many mismatches or more
    fraud_detected: bool
    n_excluded: int


@dataclass(frozen=True)
class DistanceVerdict:
    """Of `n_total` submitted pairs `n_invalid` are invalid."""

    n_total: int
    n_invalid: int
    probability_honest: float  # how likely an honest sender has that many invalid pairs or more
    fraud_detected: bool


def compare(
    computed: Mapping[int, str | None],
    received: Mapping[int, str],
    k_dim: int,
    dist_threshold: float = DIST_THRESHOLD,
    p_mismatch: float = P_MISMATCH,
    fraud_threshold: float = FRAUD_THRESHOLD,
) -> ArtifactVerdict:
    """Judges the artifacts received for the nonces of `computed`: nonce -> vector_b64, None where excluded.

    A nonce that is missing in `received` mismatches; one that is only there is not looked at.
    """
    mismatches = []
    n_excluded = 0
    for nonce, own in computed.items():
        if own is None:
            n_excluded += 1
        elif not _agree(own, received.get(nonce, ""), k_dim, dist_threshold):
            mismatches.append(nonce)
    n_total = len(computed) - n_excluded
    p_value = binomial_p_value(len(mismatches), n_total, p_mismatch)
    return ArtifactVerdict(
        n_total=n_total,
        n_mismatch=len(mismatches),
        mismatch_nonces=mismatches,
        p_value=p_value,
        fraud_detected=n_total > 0 and p_value < fraud_threshold,
        n_excluded=n_excluded,
    )


def judge_distances(
    received: Sequence[float],
    computed: Sequence[float | None],
    r_target: float,
    fraud_threshold: float = FRAUD_THRESHOLD,
) -> DistanceVerdict:
    """Judges the distances received against those computed for the same nonces, None where excluded.

    An excluded nonce counts as little as an artifact's would: it is not among n_total. ValueError: the
    lengths differ.
    """
    pairs = [(dist, own) for dist, own in zip(received, computed, strict=True) if own is not None]
    # `not <` rather than `>=`, so that a NaN is invalid too.
    n_invalid = sum(not dist < r_target or not own <= r_target for dist, own in pairs)
    probability_honest = binomial_p_value(n_invalid, len(pairs), P_INVALID)
    return DistanceVerdict(
        n_total=len(pairs),
        n_invalid=n_invalid,
        probability_honest=probability_honest,
        fraud_detected=len(pairs) > 0 and probability_honest < fraud_threshold,
    )


def _agree(own: str, other: str, k_dim: int, dist_threshold: float) -> bool:
    try:
        difference = decode_vector(own, k_dim) - decode_vector(other, k_dim)
    except VectorError:
        return False
    return float(np.linalg.norm(difference)) <= dist_threshold
