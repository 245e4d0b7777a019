"""Statistics for validation rules: how many mismatches are a fraud, and confidence limits of
counted shares.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The confidence level of `at_most` and `at_least`.
CONFIDENCE = 0.95


def least_frauds(
    n_total: "npt.ArrayLike", p_wrong: "npt.ArrayLike", fraud_threshold: float
) -> "npt.NDArray[np.int64]":
    """Returns the smallest number of mismatches among n_total nonces that is a fraud, because its
    p-value is below fraud_threshold.

    Returns n_total + 1 if even n_total mismatches are not. `p_wrong`: probability that an honest
    nonce mismatches. `n_total` and `p_wrong` may be arrays, which broadcast.
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
    """Returns the upper confidence limit of the share n_found / n_total (Clopper-Pearson,
    one-sided).
    """
    from scipy.stats import beta

    return (
        1.0 if n_found == n_total else float(beta.ppf(CONFIDENCE, n_found + 1, n_total - n_found))
    )


def at_least(n_found: int, n_total: int) -> float:
    """Returns the lower confidence limit of the share n_found / n_total (Clopper-Pearson,
    one-sided).
    """
    return 1.0 - at_most(n_total - n_found, n_total)
