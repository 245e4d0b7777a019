"""The criteria for valid nonces, and for fraud in a batch of nonces."""

from typing import Annotated

from pydantic import Field

from poc_core.fields import Probability
from poc_core.schemes.contract import Terms

# Below this probability of honesty a batch is a fraud (protocol.md, section 3).
FRAUD_THRESHOLD = 0.01

# Distances lie in [0, 2]; with a larger target every nonce would be valid.
RTarget = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]


class DistanceTerms(Terms):
    """A round's criteria (protocol.md, section 3): a nonce is valid if its distance is below
    r_target.
    """

    r_target: RTarget
    fraud_threshold: Probability = FRAUD_THRESHOLD
