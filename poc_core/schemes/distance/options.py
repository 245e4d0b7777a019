"""The options of distance proofs: the inputs besides hash, key and seq_len."""

from typing import Literal

from pydantic import Field

from poc_core.records import ProofSpec
from poc_core.schemes.contract import Options

Randomization = Literal["sign_flips", "layer_hooks"]


class DistanceOptions(Options):
    randomization: Randomization = Field(
        default="sign_flips", description="sign_flips or layer_hooks"
    )


def distance_spec(block_hash: str, public_key: str, seq_len: int, randomization: str) -> ProofSpec:
    return ProofSpec(
        scheme="distance",
        block_hash=block_hash,
        public_key=public_key,
        seq_len=seq_len,
        options=DistanceOptions.model_validate({"randomization": randomization}).model_dump(),
    )
