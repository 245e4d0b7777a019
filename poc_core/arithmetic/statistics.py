"""The binomial p-value by which verdicts detect fraud."""


def binomial_p_value(n_wrong: int, n_total: int, p_wrong: float) -> float:
    """Returns P(X >= n_wrong) for X ~ Binomial(n_total, p_wrong); 1 if n_total is 0.

    Source: protocol.md, sections 2 and 3.
    """
    if n_total == 0:
        return 1.0
    # Imported here, because scipy takes half a second and 40 MB; few processes compute p-values.
    from scipy.stats import binomtest

    return float(binomtest(n_wrong, n_total, p_wrong, alternative="greater").pvalue)
