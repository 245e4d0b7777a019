"""The verdict on claimed chains (protocol.md, section 8.3)."""

from collections.abc import Sequence
from typing import Any

from poc_core.arithmetic.statistics import binomial_p_value
from poc_core.schemes.artifact.terms import StatTest


def judge(
    nonces: Sequence[int], found: Sequence[tuple[int, float] | None], n_steps: int, test: StatTest
) -> dict[str, Any]:
    """Decides whether claimed chains are fraud. Returns the fields of the verdict.

    `found`: for each nonce, the number of claimed points that differ from this node's points, and
    the largest margin among them; None if this node did not compute the nonce. `n_steps`: the
    number of points of a chain. `test`: the criteria.
    """
    per_nonce = [
        {
            "nonce": nonce,
            "n_sphere_mismatches": one[0],
            "n_steps": n_steps,
            "mismatch_margin_max": one[1],
            "mismatch": one[0] > 0 and one[1] > test.dist_threshold,
        }
        for nonce, one in zip(nonces, found, strict=True)
        if one is not None
    ]
    mismatches = [one["nonce"] for one in per_nonce if one["mismatch"]]
    excluded = [nonce for nonce, one in zip(nonces, found, strict=True) if one is None]
    p_value = binomial_p_value(len(mismatches), len(per_nonce), test.p_mismatch)
    return {
        "n_total": len(per_nonce),
        "n_mismatch": len(mismatches),
        "mismatch_nonces": mismatches,
        "p_value": p_value,
        "fraud_detected": bool(per_nonce) and p_value < test.fraud_threshold,
        "fraud_threshold": test.fraud_threshold,
        "n_excluded": len(excluded),
        "excluded_nonces": excluded,
        "per_nonce": per_nonce,
    }
