"""The request bodies of distance proofs. A body that starts a round has the field `r_target`."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import FailFast, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from poc_core import fields, records
from poc_core.schemes import requests
from poc_core.schemes.distance.answers import ValidatedBatch
from poc_core.schemes.distance.options import (
    FRAUD_THRESHOLD,
    DistanceOptions,
    DistanceTerms,
    RTarget,
    distance_spec,
)

Distance = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DistanceRoundBody(requests.PlacedRoundBody):
    """A request to start or to store a round of distances. Unknown fields are ignored."""

    r_target: RTarget = Field(
        description="A nonce is valid if its distance is below r_target.", examples=[1.405]
    )
    fraud_threshold: fields.Probability = Field(
        default=FRAUD_THRESHOLD, description="A probability_honest below this is a fraud."
    )
    node_id: fields.Count = Field(
        default=0, ge=0, description="This node, from 0 to node_count - 1."
    )
    node_count: fields.Count = Field(default=1, ge=1, description="Nodes that share the nonces.")
    seq_len: fields.Count = Field(default=256, ge=1, description="Positions of a nonce's prefill.")
    callback_url: fields.HttpUrl = Field(
        default=None, description="Valid nonces are sent to {callback_url}/generated."
    )
    use_sign_flips: bool = Field(
        default=True, description="Randomize by flipping signs of the last hidden state."
    )
    use_layer_hooks: bool = Field(
        default=False, description="Randomize by normalizing and reflecting after every layer."
    )
    model: fields.Text | None = Field(
        default=None, description="One of several served models; optional if there is only one."
    )

    examples: ClassVar[requests.Examples] = {
        "distances": {
            "summary": "Distances",
            "value": {
                "block_hash": "block-1",
                "block_height": 1,
                "public_key": "key-1",
                "r_target": 1.405,
                "node_id": 0,
                "node_count": 1,
                "batch_size": 32,
                "seq_len": 256,
                "callback_url": "http://127.0.0.1:9100",
            },
        }
    }

    @model_validator(mode="after")
    def _one_randomization(self) -> Self:
        says_both = self.use_sign_flips and "use_sign_flips" in self.model_fields_set
        if self.use_layer_hooks and says_both:
            raise PydanticCustomError(
                "randomization", "Set use_sign_flips or use_layer_hooks, not both"
            )
        if not self.use_layer_hooks and not self.use_sign_flips:
            raise PydanticCustomError(
                "randomization", "Set one of use_sign_flips and use_layer_hooks"
            )
        return self

    @property
    def served_model(self) -> str | None:
        return self.model

    @property
    def receiver(self) -> str | None:
        return self.callback_url

    def terms(self) -> dict[str, JsonValue]:
        return DistanceTerms(
            r_target=self.r_target, fraud_threshold=self.fraud_threshold
        ).model_dump()

    def spec(self) -> records.ProofSpec:
        randomization = "layer_hooks" if self.use_layer_hooks else "sign_flips"
        return distance_spec(self.block_hash, self.public_key, self.seq_len, randomization)

    @classmethod
    def of(cls, config: records.RoundConfig) -> dict[str, Any]:
        spec, terms = config.spec, DistanceTerms.model_validate(config.terms)
        randomization = DistanceOptions.of(spec).randomization
        return {
            **cls.common_of(config),
            "model": config.model,
            "seq_len": spec.seq_len,
            "r_target": terms.r_target,
            "fraud_threshold": terms.fraud_threshold,
            "use_sign_flips": randomization == "sign_flips",
            "use_layer_hooks": randomization == "layer_hooks",
            "callback_url": config.url,
        }


class ProofBatchBody(requests.BatchBody):
    """Claimed nonces and distances to check. Unknown fields are ignored."""

    public_key: fields.Text = Field(description="Public key of the node that computes the proofs.")
    block_hash: fields.Text
    block_height: fields.Count = Field(ge=0)
    nonces: fields.Nonces
    dist: Annotated[list[Distance], FailFast()] = Field(
        description="Claimed distances of nonces, in the same order."
    )
    node_id: fields.Count = Field(
        default=0, ge=0, description="Node of the batch; returned in the answer."
    )

    answer: ClassVar[type[ValidatedBatch]] = ValidatedBatch
    examples: ClassVar[requests.Examples] = {
        "batch": {
            "summary": "Two pairs",
            "value": {
                "public_key": "key-1",
                "block_hash": "block-1",
                "block_height": 1,
                "nonces": [3, 17],
                "dist": [1.4012, 1.3987],
                "node_id": 0,
            },
        }
    }

    @model_validator(mode="after")
    def _one_distance_per_nonce(self) -> Self:
        if len(self.dist) != len(self.nonces):
            raise PydanticCustomError(
                "lengths",
                "nonces has {nonces} entries and dist {dist}; send one distance per nonce",
                {"nonces": len(self.nonces), "dist": len(self.dist)},
            )
        return self

    def job(self, config: records.RoundConfig) -> records.NewJob:
        return records.NewJob(
            model=config.model,
            spec=config.spec.model_copy(
                update={"block_hash": self.block_hash, "public_key": self.public_key}
            ),
            request=records.JobRequest(
                block_height=self.block_height,
                node_id=self.node_id,
                node_count=config.node_count,
                url=config.url,
                terms=config.terms,
            ),
            nonces=self.nonces,
            batch_size=min(config.batch_size, fields.MAX_BATCH_SIZE),
            claimed=dict(zip(self.nonces, self.dist, strict=True)),
            inline=True,
        )
