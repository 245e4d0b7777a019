"""Holding another node's artifacts against one's own: which differ, and is it fraud
(protocol.md, section 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from poc_core.arithmetic.encoding import decode_vector
from poc_core.arithmetic.statistics import binomial_p_value
from poc_core.errors import VectorError
from poc_core.schemes.artifact.terms import StatTest


@dataclass(frozen=True)
class ArtifactVerdict:
    """Of `n_total` compared nonces `n_mismatch` differ. `n_excluded` further ones this node
    could not compute.
    """

    n_total: int
    n_mismatch: int
    mismatch_nonces: list[int]  # in the order of the computed ones
    p_value: float  # how likely an honest sender has that many mismatches or more
    fraud_detected: bool
    fraud_threshold: float  # by which it was judged
    n_excluded: int


def compare(
    computed: Mapping[int, str | None],
    received: Mapping[int, str],
    k_dim: int,
    test: StatTest | None = None,
) -> ArtifactVerdict:
    """Judges the artifacts received for the nonces of `computed`: nonce -> vector_b64, None where
    excluded.

    A nonce that is missing in `received` mismatches; one that is only there is not looked at.
    """
    test = test or StatTest()
    mismatches = []
    n_excluded = 0
    for nonce, own in computed.items():
        if own is None:
            n_excluded += 1
        elif not _agree(own, received.get(nonce, ""), k_dim, test.dist_threshold):
            mismatches.append(nonce)
    n_total = len(computed) - n_excluded
    p_value = binomial_p_value(len(mismatches), n_total, test.p_mismatch)
    return ArtifactVerdict(
        n_total=n_total,
        n_mismatch=len(mismatches),
        mismatch_nonces=mismatches,
        p_value=p_value,
        fraud_detected=n_total > 0 and p_value < test.fraud_threshold,
        fraud_threshold=test.fraud_threshold,
        n_excluded=n_excluded,
    )


def _agree(own: str, other: str, k_dim: int, dist_threshold: float) -> bool:
    try:
        difference = decode_vector(own, k_dim) - decode_vector(other, k_dim)
    except VectorError:
        return False
    return float(np.linalg.norm(difference)) <= dist_threshold
