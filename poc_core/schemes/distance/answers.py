"""The answers about distance proofs, as pydantic models for OpenAPI."""

from typing import Literal

from pydantic import BaseModel, Field


class ValidatedBatch(BaseModel):
    """The verdict on a batch of distances, with the recomputed distances."""

    status: Literal["OK"] = "OK"
    request_id: str | None = Field(
        default=None,
        description="Id of the job that recomputed the batch; absent for an empty batch.",
    )
    fraud_detected: bool = Field(description="probability_honest < fraud_threshold")
    computed_distances: list[float | None] = Field(
        description="Recomputed distances of nonces; null without a finite model output."
    )
    public_key: str
    block_hash: str
    block_height: int
    nonces: list[int]
    dist: list[float | None] = Field(description="The same as computed_distances.")
    node_id: int
    received_dist: list[float]
    r_target: float
    fraud_threshold: float
    n_invalid: int
    probability_honest: float = Field(
        description="Probability that an honest sender has at least this many invalid pairs."
    )
    n_excluded: int = Field(
        description="Nonces that this node could not compute. They are neither valid nor invalid."
    )
    seq_len: int = Field(
        description="The seq_len of the round, with which the distances were recomputed."
    )


class DistanceStatus(BaseModel):
    """The fields of /status that only a distance round has."""

    valid_nonces: list[int] | None = Field(
        default=None,
        description="The newest valid nonces, or those from valid_from on. Callbacks contain all.",
    )
    valid_distances: list[float] | None = Field(
        default=None, description="The distances of valid_nonces, in the same order."
    )
    valid_from: int | None = Field(
        default=None,
        description="Index of the first of valid_nonces among all total_valid.",
    )
    total_checked: int | None = None
    total_valid: int | None = None
    elapsed_seconds: float | None = None
    rate_per_second: float | None = Field(
        default=None, description="Nonces computed per second since the round began."
    )
    r_target: float | None = None
