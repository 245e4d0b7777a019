"""The options of artifact proofs: the inputs besides block_hash, public_key and seq_len."""

from pydantic import Field, ValidationInfo, field_validator

from poc_core.schemes.requests import Options


class ArtifactOptions(Options):
    k_dim: int = Field(
        default=12, ge=1, description="an integer from 1 to {hidden_size}, the model's hidden size"
    )
    stronger_rng: bool = Field(default=False, description="true or false")

    @field_validator("k_dim")
    @classmethod
    def _fits(cls, k_dim: int, info: ValidationInfo) -> int:
        if info.context and k_dim > info.context["hidden_size"]:
            raise ValueError("more than the model has")
        return k_dim
