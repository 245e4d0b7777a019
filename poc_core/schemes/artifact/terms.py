"""The criteria by which a validation reports artifacts as fraud."""

from pydantic import Field

from poc_core.fields import Probability
from poc_core.schemes.artifact import thresholds
from poc_core.schemes.contract import Terms


class StatTest(Terms):
    """The criteria of a validation of artifacts (protocol.md, section 2, Validation)."""

    dist_threshold: float = Field(
        default=thresholds.DIST_THRESHOLD,
        ge=0,
        allow_inf_nan=False,
        description="Largest L2 distance at which two vectors still agree.",
    )
    p_mismatch: Probability = Field(
        default=thresholds.P_MISMATCH,
        description="How likely an honest artifact lies further than dist_threshold.",
    )
    fraud_threshold: Probability = Field(
        default=thresholds.FRAUD_THRESHOLD,
        description="Below this p_value the artifacts are a fraud.",
    )


class ArtifactTerms(StatTest):
    """The criteria of one validation, with their source."""

    source: str = "the request"
