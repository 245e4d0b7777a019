"""The options of decode proofs: the inputs besides block_hash, public_key and seq_len."""

from pydantic import Field, ValidationInfo, field_validator

from poc_core import records
from poc_core.schemes.requests import Options

# The number of dimensions that are read from a hidden state.
PICKED = 256
# Largest margin of an honest step, for requests without a stat_test (protocol.md, section 8.3).
MARGIN = 0.025


class DecodeOptions(Options):
    max_tokens: int = Field(ge=1, description="an integer above 0")
    per_nonce_reflection: bool = Field(default=False, description="true or false")
    # Has no effect, and is only returned in `encoding`.
    k_dim: int = Field(default=12, ge=1, description="an integer above 0")
    # nonce -> the claimed points of the prefill and of each step. With claims, the claimed points
    # determine the inputs of the steps, and the values are the margins of the claims.
    enforced: dict[str, list[int]] | None = Field(
        default=None, description="lists of integers by nonce"
    )

    # True to check claims in decode steps instead of one forward pass. Slow; only for comparison.
    stepwise: bool = Field(default=False, description="true or false")

    @field_validator("max_tokens")
    @classmethod
    def _fits(cls, max_tokens: int, info: ValidationInfo) -> int:
        if info.context and info.context["hidden_size"] < PICKED:
            raise ValueError("the model is too narrow")
        return max_tokens


def passes_of(spec: records.ProofSpec) -> records.Passes:
    """Returns each nonce's forward passes: a prefill and decode steps, or one pass of all positions
    if the spec has claimed points and is not `stepwise`. SpecError if the options are invalid.
    """
    light = spec.model_copy(update={"options": {**spec.options, "enforced": None}})
    options = DecodeOptions.checked(light, PICKED)
    if spec.options.get("enforced") is None or options.stepwise:
        return records.Passes(spec.seq_len, options.max_tokens)
    return records.Passes(spec.seq_len + options.max_tokens)
