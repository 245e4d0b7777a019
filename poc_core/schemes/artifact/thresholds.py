"""The default criteria of validations, for fields that a request leaves out."""

from typing import NamedTuple

# Defaults for a stat_test with a dist_threshold, from the reference's example (protocol.md, section
# 2, Validation): the largest L2 distance at which two vectors still agree, the probability that an
# honest artifact is further away, and the p_value below which artifacts are a fraud.
DIST_THRESHOLD, P_MISMATCH, FRAUD_THRESHOLD = 0.02, 0.001, 0.01


class NetworkTerms(NamedTuple):
    """The criteria that the network's chain sends with validations of a model's artifacts."""

    dist_threshold: float
    source: str
    p_mismatch: float = 0.1
    fraud_threshold: float = 0.05


_DEFAULT = NetworkTerms(0.4, "the network's default")
# dist_threshold by the model's name on the chain.
_OF_MODELS = {
    "MiniMaxAI/MiniMax-M2.7": 0.75,
    "deepseek-ai/DeepSeek-V4-Flash-0731": 0.41,
    "zai-org/GLM-5.3-Flash": 0.44,
}


def network_terms(model: str) -> NetworkTerms:
    """Returns the chain's criteria for the served model; the chain's defaults if it has none."""
    threshold = _OF_MODELS.get(model)
    return _DEFAULT if threshold is None else NetworkTerms(threshold, f"the network's for {model}")
