"""Statistics of verdict rules: smallest frauds, and confidence limits of counted shares."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The confidence level of `at_most` and `at_least`.
CONFIDENCE = 0.95


def least_frauds(
    n_total: "npt.ArrayLike", p_wrong: "npt.ArrayLike", fraud_threshold: float
) -> "npt.NDArray[np.int64]":
    """Returns the smallest numbers of mismatches that are a fraud: p-value below fraud_threshold.

    Returns n_total + 1 if no number is. `n_total` and `p_wrong` (between 0 and 1) broadcast.
    """
    import numpy as np
    from scipy.stats import binom

    fewest: npt.NDArray[np.float64] = (
        np.maximum(binom.isf(fraud_threshold, n_total, p_wrong), 0) + 1
    )
    # isf may be off by one near the threshold; sf, which verdicts use, decides.
    fewest += binom.sf(fewest - 1, n_total, p_wrong) >= fraud_threshold
    fewest -= (fewest > 1) & (binom.sf(fewest - 2, n_total, p_wrong) < fraud_threshold)
    return fewest.astype(np.int64)


def at_most(n_found: int, n_total: int) -> float:
    """Returns the upper confidence limit of n_found / n_total (Clopper-Pearson, one-sided)."""
    from scipy.stats import beta

    return (
        1.0 if n_found == n_total else float(beta.ppf(CONFIDENCE, n_found + 1, n_total - n_found))
    )


def at_least(n_found: int, n_total: int) -> float:
    """Returns the lower confidence limit of n_found / n_total (Clopper-Pearson, one-sided)."""
    return 1.0 - at_most(n_total - n_found, n_total)
