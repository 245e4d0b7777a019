"""How unlikely an honest node's mistakes are, and how sure one may be of a counted share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# How sure `at_most` and `at_least` are.
CONFIDENCE = 0.95


def binomial_p_value(n_wrong: int, n_total: int, p_wrong: float) -> float:
    """P(X >= n_wrong), X ~ Binomial(n_total, p_wrong); 1 if n_total is 0 (protocol.md, 2, 3)."""
    if n_total == 0:
        return 1.0
    # Imported here: half a second and 40 MB, which a process that never judges need not spend.
    from scipy.stats import binomtest

    return float(binomtest(n_wrong, n_total, p_wrong, alternative="greater").pvalue)


def least_frauds(
    n_total: npt.ArrayLike, p_wrong: npt.ArrayLike, fraud_threshold: float
) -> npt.NDArray[np.int64]:
    """Smallest n_wrong whose binomial_p_value is below fraud_threshold; n_total + 1: none.

    `n_total` and `p_wrong` (above 0, below 1) broadcast.
    """
    import numpy as np
    from scipy.stats import binom

    fewest: npt.NDArray[np.float64] = (
        np.maximum(binom.isf(fraud_threshold, n_total, p_wrong), 0) + 1
    )
    # isf rounds in its own way near the threshold: the verdict's own function decides.
    fewest += binom.sf(fewest - 1, n_total, p_wrong) >= fraud_threshold
    fewest -= (fewest > 1) & (binom.sf(fewest - 2, n_total, p_wrong) < fraud_threshold)
    return fewest.astype(np.int64)


def at_most(n_found: int, n_total: int) -> float:
    """Upper limit of a share, n_found of n_total counted (Clopper-Pearson, one-sided)."""
    from scipy.stats import beta

    return (
        1.0 if n_found == n_total else float(beta.ppf(CONFIDENCE, n_found + 1, n_total - n_found))
    )


def at_least(n_found: int, n_total: int) -> float:
    """Lower limit of that share (Clopper-Pearson, one-sided)."""
    return 1.0 - at_most(n_total - n_found, n_total)
