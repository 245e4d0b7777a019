"""The bodies that start and switch rounds (protocol.md, section 5). `r_target` in a body means a distance round."""

from typing import Annotated, Any, Self

from fastapi import HTTPException
from pydantic import BaseModel, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from api.bodies import ArtifactParams, Count, HttpUrl, Nonces, Text
from api.errors import malformed_body
from poc_core.records import Probability

# Bytes of a body that starts a round. A right one has no lists and takes below 3,000.
_MAX_BYTES = 64 * 1024

# Bounded by what the workers hold, which only their registry knows: see round_admission.
BatchSize = Annotated[Count, Field(ge=1)]
Distance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Distances lie in [0, 2]: a larger target would call every nonce valid.
RTarget = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]


def _smaller(name: str, value: int, of: str, count: int) -> None:
    if value >= count:
        raise PydanticCustomError(
            "id_beyond_count",
            "{name} must be smaller than {of}, which is {count}",
            {"name": name, "of": of, "count": count},
        )


class _RoundBody(BaseModel):
    block_hash: Text = Field(description="Seeds the inputs, with public_key, and the layers' reflections.")
    block_height: Count = Field(ge=0, description="Handed back in callbacks.")
    public_key: Text = Field(description="Whose proofs these are.")


class ArtifactRoundBody(_RoundBody):
    """Starts a round of artifacts. Unknown fields are ignored, but for those in `params`."""

    node_id: Count = Field(ge=0, description="This node, from 0 to node_count - 1.")
    node_count: Count = Field(ge=1, description="Nodes that share the nonces.")
    group_id: Count = Field(0, ge=0, description="This group, from 0 to n_groups - 1.")
    n_groups: Count = Field(1, ge=1, description="Groups that share the node's nonces.")
    batch_size: BatchSize | None = Field(
        None, description="As the client counts; workers compute as many nonces at a time as fit."
    )
    params: ArtifactParams
    url: HttpUrl = Field(None, description="The artifacts are sent to {url}/generated.")
    poc_stronger_rng: bool = Field(False, description="Inputs from eight seeds per nonce instead of one.")

    @model_validator(mode="after")
    def _ids_below_counts(self) -> Self:
        _smaller("node_id", self.node_id, "node_count", self.node_count)
        _smaller("group_id", self.group_id, "n_groups", self.n_groups)
        return self


class DistanceRoundBody(_RoundBody):
    """Starts or stores a round of distances. Unknown fields are ignored."""

    r_target: RTarget = Field(description="A nonce is valid when its distance is below this.", examples=[1.405])
    fraud_threshold: Probability = Field(0.01, description="Below this probability of honesty a batch is a fraud.")
    node_id: Count = Field(0, ge=0, description="This node, from 0 to node_count - 1.")
    node_count: Count = Field(1, ge=1, description="Nodes that share the nonces.")
    batch_size: BatchSize | None = Field(
        None, description="As the client counts; workers compute as many nonces at a time as fit."
    )
    seq_len: Count = Field(256, ge=1, description="Positions of a nonce's prefill.")
    callback_url: HttpUrl = Field(None, description="Valid nonces are sent to {callback_url}/generated.")
    use_sign_flips: bool = Field(True, description="Randomize by flipping signs of the last hidden state.")
    use_layer_hooks: bool = Field(False, description="Randomize by normalizing and reflecting after every layer.")
    model: Text | None = Field(None, description="Which of several served models; not needed where there is one.")

    @model_validator(mode="after")
    def _one_randomization(self) -> Self:
        if self.use_layer_hooks and self.use_sign_flips and "use_sign_flips" in self.model_fields_set:
            raise PydanticCustomError("randomization", "Set use_sign_flips or use_layer_hooks, not both")
        if not self.use_layer_hooks and not self.use_sign_flips:
            raise PydanticCustomError("randomization", "Set one of use_sign_flips and use_layer_hooks")
        return self

    @model_validator(mode="after")
    def _id_below_count(self) -> Self:
        _smaller("node_id", self.node_id, "node_count", self.node_count)
        return self

    @property
    def randomization(self) -> str:
        return "layer_hooks" if self.use_layer_hooks else "sign_flips"


class ProofBatchBody(BaseModel):
    """Somebody's nonces and distances, to be checked. Unknown fields are ignored."""

    public_key: Text = Field(description="Whose proofs these are.")
    block_hash: Text
    block_height: Count = Field(ge=0)
    nonces: Nonces
    dist: Annotated[list[Distance], FailFast()] = Field(description="Of nonces, in their order.")
    node_id: Count = Field(0, ge=0, description="Whose batch it is; handed back.")

    @model_validator(mode="after")
    def _one_distance_per_nonce(self) -> Self:
        if len(self.dist) != len(self.nonces):
            raise PydanticCustomError(
                "lengths",
                "nonces has {nonces} entries and dist {dist}; send one distance per nonce",
                {"nonces": len(self.nonces), "dist": len(self.dist)},
            )
        return self


class _Generation(BaseModel):
    r_target: Any = None


def parse_round(raw: bytes) -> ArtifactRoundBody | DistanceRoundBody:
    """Either generation's body, told apart by r_target. HTTPException 413 or 422 says what is wrong with it."""
    _check_size(raw)
    try:
        distance = "r_target" in _Generation.model_validate_json(raw).model_fields_set
        return (DistanceRoundBody if distance else ArtifactRoundBody).model_validate_json(raw)
    except ValidationError as error:
        raise malformed_body(error) from None


def parse_distance_round(raw: bytes) -> DistanceRoundBody:
    """For calls that only the earlier generation of clients makes."""
    _check_size(raw)
    try:
        return DistanceRoundBody.model_validate_json(raw)
    except ValidationError as error:
        raise malformed_body(error) from None


def _check_size(raw: bytes) -> None:
    """Before it is parsed: a body of 32 MB of short items would take a gigabyte, and the event loop's time."""
    if len(raw) > _MAX_BYTES:
        raise HTTPException(413, f"A body that starts a round has at most {_MAX_BYTES} bytes.")
