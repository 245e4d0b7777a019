"""How unlikely an honest node's mistakes are."""


def binomial_p_value(n_wrong: int, n_total: int, p_wrong: float) -> float:
    """P(X >= n_wrong) for X ~ Binomial(n_total, p_wrong); 1 when nothing was tested (protocol.md, sections 2 and 3)."""
    if n_total == 0:
        return 1.0
    # Imported here: it takes half a second and 40 MB, which a process that never judges need not spend.
    from scipy.stats import binomtest

    return float(binomtest(n_wrong, n_total, p_wrong, alternative="greater").pvalue)
