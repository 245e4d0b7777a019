"""The terms of a validation whose request names none, or only some."""

from typing import NamedTuple

# What a stat_test leaves out beside its own dist_threshold: the reference's example (protocol.md,
# section 2, Validation). Largest L2 distance at which two vectors still agree; how likely an honest
# artifact lies further away; the p_value below which artifacts are a fraud.
DIST_THRESHOLD, P_MISMATCH, FRAUD_THRESHOLD = 0.02, 0.001, 0.01


class NetworkTerms(NamedTuple):
    """The terms that the network's chain sends with a validation of a model's artifacts."""

    dist_threshold: float
    source: str
    p_mismatch: float = 0.1
    fraud_threshold: float = 0.05


_DEFAULT = NetworkTerms(0.4, "the network's default")
# By the name that the chain serves a model under.
_OF_MODELS = {
    "MiniMaxAI/MiniMax-M2.7": 0.75,
    "deepseek-ai/DeepSeek-V4-Flash-0731": 0.41,
    "zai-org/GLM-5.3-Flash": 0.44,
}


def network_terms(model: str) -> NetworkTerms:
    """The chain's terms for a model by its served name; its default for others."""
    threshold = _OF_MODELS.get(model)
    return _DEFAULT if threshold is None else NetworkTerms(threshold, f"the network's for {model}")
