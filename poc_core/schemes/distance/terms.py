"""Which nonces of a round are valid, and when a batch of them is a fraud."""

from typing import Annotated

from pydantic import Field

from poc_core.fields import Probability
from poc_core.schemes.contract import Terms

# Below this probability of honesty a batch is a fraud (protocol.md, section 3).
FRAUD_THRESHOLD = 0.01

# Distances lie in [0, 2]: a larger target would call every nonce valid.
RTarget = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]


class DistanceTerms(Terms):
    """A round's terms (protocol.md, section 3): a nonce below distance r_target is valid."""

    r_target: RTarget
    fraud_threshold: Probability = FRAUD_THRESHOLD
