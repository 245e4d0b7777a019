"""The options of distance proofs, and the criteria of distance rounds (protocol.md, section 3)."""

from typing import Annotated, Literal

from pydantic import Field

from poc_core.fields import Probability
from poc_core.records import ProofSpec
from poc_core.schemes.requests import Options, Terms

Randomization = Literal["sign_flips", "layer_hooks"]

# A batch with a smaller probability_honest is a fraud (protocol.md, section 3).
FRAUD_THRESHOLD = 0.01

# Distances are in [0, 2]; with a larger target every nonce would be valid.
RTarget = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]


class DistanceOptions(Options):
    randomization: Randomization = Field(
        default="sign_flips", description="sign_flips or layer_hooks"
    )


class DistanceTerms(Terms):
    """The criteria of a distance round (protocol.md, section 3). A nonce is valid if its distance
    is below r_target.
    """

    r_target: RTarget
    fraud_threshold: Probability = FRAUD_THRESHOLD


def distance_spec(block_hash: str, public_key: str, seq_len: int, randomization: str) -> ProofSpec:
    return ProofSpec(
        scheme="distance",
        block_hash=block_hash,
        public_key=public_key,
        seq_len=seq_len,
        options=DistanceOptions.model_validate({"randomization": randomization}).model_dump(),
    )
