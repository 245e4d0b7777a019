"""The criteria by which a validation reports artifacts as fraud."""

from pydantic import Field

from poc_core.fields import Probability
from poc_core.schemes.artifact import thresholds
from poc_core.schemes.requests import Terms


class StatTest(Terms):
    """The criteria of a validation of artifacts (protocol.md, section 2, Validation)."""

    dist_threshold: float = Field(
        default=thresholds.DIST_THRESHOLD,
        ge=0,
        allow_inf_nan=False,
        description="Largest L2 distance at which two vectors agree.",
    )
    p_mismatch: Probability = Field(
        default=thresholds.P_MISMATCH,
        description="Probability that an honest artifact is further than dist_threshold.",
    )
    fraud_threshold: Probability = Field(
        default=thresholds.FRAUD_THRESHOLD,
        description="A p_value below this is a fraud.",
    )


class ArtifactTerms(StatTest):
    """The criteria of one validation, and where these criteria come from."""

    source: str = "the request"


class ReceivedStatTest(StatTest):
    """The criteria of a validation in a request (protocol.md, section 2, Validation)."""

    p_value_threshold: Probability | None = Field(
        default=None,
        description=(
            "Another fraud_threshold, which is ignored unless POC_HONOUR_P_VALUE_THRESHOLD=true and"
            " fraud_threshold is absent."
        ),
    )

    def applied(
        self, honour_p_value_threshold: bool, usual: thresholds.NetworkTerms | None = None
    ) -> ArtifactTerms:
        """Returns the validation's criteria, with defaults for absent fields.
        `honour_p_value_threshold`: True to use p_value_threshold if fraud_threshold is absent.
        `usual`: the defaults if dist_threshold is absent; None for those of StatTest, which always
        apply together with a dist_threshold.
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
