"""Compares another node's artifacts with this node's to detect fraud (protocol.md, section 2)."""

from collections.abc import Mapping

import numpy as np

from poc_core.arithmetic.statistics import binomial_p_value
from poc_core.errors import VectorError
from poc_core.schemes.artifact.answers import DistanceSummary, Verdict
from poc_core.schemes.artifact.causes import likely_cause
from poc_core.schemes.artifact.encoding import decode_vector
from poc_core.schemes.artifact.terms import StatTest

# Upper limits of the histogram's bins; the last bin includes all larger distances, up to 2.
_EDGES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def compare(
    computed: Mapping[int, str | None],
    received: Mapping[int, str],
    k_dim: int,
    test: StatTest | None = None,
) -> Verdict:
    """Compares another node's artifacts with this node's artifacts. Returns the verdict.

    `computed`: this node's vector_b64 of each nonce; None for an excluded nonce, which is not
    compared. `received`: the other node's vector_b64 of each nonce; a missing nonce is a mismatch.
    `test`: the criteria; None means the default criteria.
    """
    test = test or StatTest()
    found = {
        nonce: _distance(own, received.get(nonce, ""), k_dim)
        for nonce, own in computed.items()
        if own is not None
    }
    mismatches = {
        nonce: distance
        for nonce, distance in found.items()
        if distance is None or distance > test.dist_threshold
    }
    p_value = binomial_p_value(len(mismatches), len(found), test.p_mismatch)
    is_fraud = bool(found) and p_value < test.fraud_threshold
    return Verdict(
        n_total=len(found),
        n_mismatch=len(mismatches),
        mismatch_nonces=list(mismatches),
        p_value=p_value,
        fraud_detected=is_fraud,
        fraud_threshold=test.fraud_threshold,
        n_excluded=len(computed) - len(found),
        dist_threshold=test.dist_threshold,
        p_mismatch=test.p_mismatch,
        distances=_distances([distance for distance in found.values() if distance is not None]),
        likely_cause=likely_cause(list(mismatches.values()), len(found)) if is_fraud else None,
    )


def _distance(own: str, other: str, k_dim: int) -> float | None:
    try:
        difference = decode_vector(own, k_dim) - decode_vector(other, k_dim)
    except VectorError:
        return None
    return float(np.linalg.norm(difference))


def _distances(found: list[float]) -> DistanceSummary | None:
    if not found:
        return None
    places = np.searchsorted(_EDGES, found).clip(max=len(_EDGES) - 1)
    counts = np.bincount(places)
    histogram = [(_EDGES[place], int(counts[place])) for place in range(min(places), len(counts))]
    median = float(np.median(found))
    return DistanceSummary(min=min(found), median=median, max=max(found), histogram=histogram)
