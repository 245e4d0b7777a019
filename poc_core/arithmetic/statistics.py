"""How unlikely an honest node's mistakes are, and how sure one may be of a share that was
counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# How sure `at_most` and `at_least` are.
CONFIDENCE = 0.95


def binomial_p_value(n_wrong: int, n_total: int, p_wrong: float) -> float:
    """P(X >= n_wrong) for X ~ Binomial(n_total, p_wrong); 1 when nothing was tested
    (protocol.md, sections 2 and 3).
    """
    if n_total == 0:
        return 1.0
    # Imported here: it takes half a second and 40 MB, which a process that never judges need not
    # spend.
    from scipy.stats import binomtest

    return float(binomtest(n_wrong, n_total, p_wrong, alternative="greater").pvalue)


def least_frauds(
    n_total: npt.ArrayLike, p_wrong: npt.ArrayLike, fraud_threshold: float
) -> npt.NDArray[np.int64]:
    """The fewest wrong ones of each n_total whose binomial_p_value is below fraud_threshold;
    n_total + 1: none is.

    `p_wrong`: above 0, below 1. Both are broadcast.
    """
    import numpy as np
    from scipy.stats import binom

    fewest: npt.NDArray[np.float64] = (
        np.maximum(binom.isf(fraud_threshold, n_total, p_wrong), 0) + 1
    )
    # isf rounds in its own way where a probability is as good as the threshold: the verdict's word
    # is the last.
    fewest += binom.sf(fewest - 1, n_total, p_wrong) >= fraud_threshold
    fewest -= (fewest > 1) & (binom.sf(fewest - 2, n_total, p_wrong) < fraud_threshold)
    return fewest.astype(np.int64)


def at_most(n_found: int, n_total: int) -> float:
    """The share that a count does not exclude, upwards: the exact limit of Clopper and Pearson,
    one-sided.
    """
    from scipy.stats import beta

    return (
        1.0 if n_found == n_total else float(beta.ppf(CONFIDENCE, n_found + 1, n_total - n_found))
    )


def at_least(n_found: int, n_total: int) -> float:
    """The same downwards."""
    return 1.0 - at_most(n_total - n_found, n_total)
