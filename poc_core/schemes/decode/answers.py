"""The answers to jobs that compute or validate decode proofs, as models for OpenAPI."""

from pydantic import BaseModel, Field

from poc_core.fields import Nonce
from poc_core.schemes.artifact.answers import Completed, Encoding, ValidationResult
from poc_core.schemes.decode.requests import CHAIN_EXAMPLE
from poc_core.schemes.requests import REQUEST_ID_EXAMPLE, Examples


class Chain(BaseModel):
    nonce: Nonce
    vector_b64: str = ""
    k_points_steps: list[int] = Field(
        description="max_tokens + 1 points, 0 to 15: the prefill's and each step's."
    )


class DecodeResult(Completed):
    artifacts: list[Chain] = Field(description="In the order of the request's nonces.")
    encoding: Encoding
    excluded_nonces: list[int] = Field(
        default=[], description="Nonces without a finite model output."
    )


class NonceVerdict(BaseModel):
    nonce: int
    n_sphere_mismatches: int = Field(
        description="Steps whose claimed point differs from this node's."
    )
    n_steps: int
    mismatch_margin_max: float = Field(
        description="Largest margin of a claimed point to this node's best point."
    )
    mismatch: bool = Field(description="mismatch_margin_max > dist_threshold")


class DecodeValidationResult(ValidationResult):
    excluded_nonces: list[int] = Field(default=[], description="The nonces counted in n_excluded.")
    per_nonce: list[NonceVerdict]


DECODE_EXAMPLES: Examples = {
    "chains": {
        "summary": "Completed",
        "value": {
            "status": "completed",
            "request_id": REQUEST_ID_EXAMPLE,
            "artifacts": [{"nonce": 0, "vector_b64": "", "k_points_steps": CHAIN_EXAMPLE}],
            "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
        },
    }
}
