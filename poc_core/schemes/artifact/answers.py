"""The answers to jobs that compute or validate artifacts, as models for OpenAPI."""

from typing import Literal

from pydantic import BaseModel, Field

from poc_core.schemes.artifact.causes import SOME_MADE_UP
from poc_core.schemes.artifact.requests import VECTOR_EXAMPLE, Artifact
from poc_core.schemes.requests import REQUEST_ID_EXAMPLE, Examples


class Encoding(BaseModel):
    dtype: Literal["f16"] = "f16"
    k_dim: int
    endian: Literal["le"] = "le"


class Completed(BaseModel):
    """The first fields of the answer to a completed job."""

    status: Literal["completed"] = "completed"
    request_id: str


class ArtifactResult(Completed):
    artifacts: list[Artifact] = Field(description="In the order of the request's nonces.")
    encoding: Encoding
    excluded_nonces: list[int] = Field(
        default=[],
        description=(
            "Nonces without an artifact: the model gave no finite state. Absent when there are"
            " none."
        ),
    )


class DistanceSummary(BaseModel):
    """L2 distances of the compared vectors, without unreadable vectors."""

    min: float
    median: float
    max: float
    histogram: list[tuple[float, int]] = Field(
        default=[],
        description="Pairs [d, n]: n distances are at most d and larger than the d of the"
        " previous pair.",
    )


class Verdict(BaseModel):
    """The verdict on claimed artifacts or chains."""

    n_total: int = Field(description="Nonces compared.")
    n_mismatch: int
    mismatch_nonces: list[int]
    p_value: float = Field(
        description="Probability that an honest sender has at least this many mismatches."
    )
    fraud_detected: bool = Field(description="p_value < fraud_threshold")
    fraud_threshold: float = Field(description="The fraud_threshold that was used.")
    n_excluded: int = Field(
        description="Nonces that this node could not compute. They do not count as mismatches."
    )
    dist_threshold: float | None = Field(
        default=None, description="Largest distance at which two artifacts agree."
    )
    p_mismatch: float | None = Field(
        default=None, description="Probability that an honest artifact is further away."
    )
    terms: str | None = Field(
        default=None,
        description=(
            "Source of dist_threshold, p_mismatch and fraud_threshold: the request, the network"
            " for this model, or the network's default."
        ),
    )
    distances: DistanceSummary | None = None
    likely_cause: str | None = Field(
        default=None,
        description="For a fraud: the likely cause, guessed from the distances.",
    )


class ValidationResult(Verdict, Completed):
    """The answer to a completed validation."""


_NONE_BETWEEN = [[edge, 0] for edge in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)]

RESULT_EXAMPLES: Examples = {
    "artifacts": {
        "summary": "Completed",
        "value": {
            "status": "completed",
            "request_id": REQUEST_ID_EXAMPLE,
            "artifacts": [{"nonce": 0, "vector_b64": VECTOR_EXAMPLE}],
            "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
        },
    },
    "validation": {
        "summary": "Completed, with validation",
        "value": {
            "status": "completed",
            "request_id": REQUEST_ID_EXAMPLE,
            "n_total": 400,
            "n_mismatch": 20,
            "mismatch_nonces": list(range(20)),
            "p_value": 1.9e-27,
            "fraud_detected": True,
            "fraud_threshold": 0.01,
            "n_excluded": 0,
            "dist_threshold": 0.02,
            "p_mismatch": 0.001,
            "terms": "the request",
            "distances": {
                "min": 0.0001,
                "median": 0.0004,
                "max": 1.6211,
                "histogram": [[0.0005, 300], [0.001, 80], *_NONE_BETWEEN, [1.0, 3], [2.0, 17]],
            },
            "likely_cause": SOME_MADE_UP,
        },
    },
}
