"""The criteria by which a validation reports artifacts as fraud."""

from typing import NamedTuple

from pydantic import Field

from poc_core.fields import Probability
from poc_core.schemes.requests import Terms

# Defaults for a stat_test with a dist_threshold (protocol.md, section 2, Validation): see StatTest.
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
    """Returns the chain's criteria for the model with this name, or the chain's defaults."""
    threshold = _OF_MODELS.get(model)
    return _DEFAULT if threshold is None else NetworkTerms(threshold, f"the network's for {model}")


class StatTest(Terms):
    """The criteria of a validation of artifacts (protocol.md, section 2, Validation)."""

    dist_threshold: float = Field(
        default=DIST_THRESHOLD,
        ge=0,
        allow_inf_nan=False,
        description="Largest L2 distance at which two vectors agree.",
    )
    p_mismatch: Probability = Field(
        default=P_MISMATCH,
        description="Probability that an honest artifact is further than dist_threshold.",
    )
    fraud_threshold: Probability = Field(
        default=FRAUD_THRESHOLD,
        description="A p_value below this is a fraud.",
    )


class ArtifactTerms(StatTest):
    """The criteria of one validation, and where these criteria come from."""

    source: str = "the request"


class ReceivedStatTest(StatTest):
    """The criteria for a validation, as received in a request (protocol.md, section 2)."""

    p_value_threshold: Probability | None = Field(
        default=None,
        description=(
            "Another fraud_threshold, which is ignored unless POC_HONOUR_P_VALUE_THRESHOLD=true and"
            " fraud_threshold is absent."
        ),
    )

    def applied(
        self, honour_p_value_threshold: bool, usual: NetworkTerms | None = None
    ) -> ArtifactTerms:
        """Returns the criteria, with defaults for absent fields. `honour_p_value_threshold`: True
        to use p_value_threshold if fraud_threshold is absent. `usual`: the defaults for a request
        without dist_threshold; None means the defaults of StatTest. If the request has a
        dist_threshold, the defaults of StatTest always apply.
        """
        named = self.model_dump(include=self.model_fields_set & StatTest.model_fields.keys())
        if honour_p_value_threshold and self.p_value_threshold is not None:
            named.setdefault("fraud_threshold", self.p_value_threshold)
        if usual is None or "dist_threshold" in named:
            return ArtifactTerms(**named)
        source = (
            f"{usual.source}, but {' and '.join(named)} the request's" if named else usual.source
        )
        return ArtifactTerms(**usual._asdict() | named | {"source": source})
