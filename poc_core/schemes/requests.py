"""The bodies that clients send (protocol.md, section 5), as far as all schemes share them.

A wrong body's problems are listed in the order of its fields.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from poc_core.errors import ClaimsError
from poc_core.fields import MAX_BATCH_SIZE, Count, HttpUrl, Nonces, Text, check_id
from poc_core.records import NewJob, ProofSpec, RoundConfig

# Examples for OpenAPI: name -> {"summary": ..., "value": a body or an answer}.
Examples = dict[str, dict[str, Any]]
# How a body's example begins.
PLACE_EXAMPLE = {
    "block_hash": "block-1",
    "block_height": 1,
    "public_key": "key-1",
    "node_id": 0,
    "node_count": 1,
}
REQUEST_ID_EXAMPLE = "0f2b6c1d9e4a4f0d8a7c5b3e1f2d4c6a"


class Params(BaseModel):
    """Inputs of the values; an unlisted field is refused."""

    model_config = ConfigDict(extra="forbid")

    model: Text = Field(
        description="The model's name as the workers serve it.", examples=["tiny-qwen3"]
    )
    seq_len: Count = Field(ge=1, description="Positions of a nonce's prefill.", examples=[256])


class JobBody(BaseModel, ABC):
    """POST /generate: nonces to be computed or, with claims, values to be judged.

    Unknown fields are ignored, but for those in `params`.
    """

    examples: ClassVar[Examples] = {}

    block_hash: Text = Field(
        description="Seeds the layers' reflections and, with public_key, the inputs."
    )
    block_height: Count = Field(ge=0, description="Handed back in callbacks.")
    public_key: Text = Field(description="Whose proofs these are.")
    # Not held against each other, unlike a round's: validators pass on others' node_id.
    node_id: Count = Field(ge=0, description="Handed back in callbacks.")
    node_count: Count = Field(ge=1, description="Nodes that share the nonces.")
    nonces: Nonces = Field(min_length=1, description="The nonces to compute, each once.")
    params: Params
    batch_size: Count | None = Field(
        default=None,
        ge=1,
        le=MAX_BATCH_SIZE,
        description=(
            "Nonces per task; POC_BATCH_SIZE_DEFAULT where absent. A worker that can hold fewer"
            " gets fewer."
        ),
    )
    wait: bool = Field(
        default=False,
        description="True: the answer is the result. False: a request_id to ask for it.",
    )
    url: HttpUrl = Field(
        default=None,
        description="Where the result is sent as well: to {url}/generated or {url}/validated.",
    )

    @abstractmethod
    def spec(self) -> ProofSpec:
        """Returns the inputs that determine the values."""

    def terms(self, honour_p_value_threshold: bool) -> dict[str, JsonValue]:
        """The terms by which claims are judged. True: see Settings.honour_p_value_threshold."""
        return {}

    def claims(self) -> dict[int, JsonValue] | None:
        """nonce -> its claimed value; None: nothing to judge. ClaimsError: not those of `nonces`.

        A claim that cannot be read is a wrong one, no error: no cheat can fail its own validation.
        """
        return None


class RoundBody(BaseModel, ABC):
    """POST /init/generate and, where rounds have phases, /init and /init/validate."""

    examples: ClassVar[Examples] = {}

    block_hash: Text = Field(
        description="Seeds the inputs, with public_key, and the layers' reflections."
    )
    block_height: Count = Field(ge=0, description="Handed back in callbacks.")
    public_key: Text = Field(description="Whose proofs these are.")

    @property
    @abstractmethod
    def served_model(self) -> str | None:
        """The model by the name it is served under; None: the only one that is."""

    @property
    @abstractmethod
    def asked_batch_size(self) -> int | None:
        """Nonces that a worker computes at a time; None: as many as fit."""

    @abstractmethod
    def spec(self) -> ProofSpec:
        """Returns the inputs that determine the values."""

    @abstractmethod
    def config(self, model: str, batch_size: int) -> RoundConfig:
        """Returns the stored configuration, with the model and batch size that admission found."""

    @classmethod
    @abstractmethod
    def of(cls, config: RoundConfig) -> dict[str, Any]:
        """The configuration in the words of this body, for /status."""

    @staticmethod
    def common_of(config: RoundConfig) -> dict[str, Any]:
        """The first keys of `of`, which tell a node's place among others."""
        return {
            "block_hash": config.spec.block_hash,
            "block_height": config.block_height,
            "public_key": config.spec.public_key,
            "node_id": config.node_id,
            "node_count": config.node_count,
            "batch_size": config.batch_size,
            "group_id": config.group_id,
            "n_groups": config.n_groups,
        }


class PlacedRoundBody(RoundBody):
    """A round of a node and a group, each one of several that share the nonces."""

    node_id: Count = Field(ge=0, description="This node, from 0 to node_count - 1.")
    node_count: Count = Field(ge=1, description="Nodes that share the nonces.")
    group_id: Count = Field(default=0, ge=0, description="This group, from 0 to n_groups - 1.")
    n_groups: Count = Field(default=1, ge=1, description="Groups that share the node's nonces.")
    # Bounded by what the workers hold, which only their registry knows.
    batch_size: Annotated[Count, Field(ge=1)] | None = Field(
        default=None,
        description="As the client counts; workers compute as many nonces at a time as fit.",
    )

    @model_validator(mode="after")
    def _ids_below_counts(self) -> Self:
        check_id("node_id", self.node_id, "node_count", self.node_count)
        check_id("group_id", self.group_id, "n_groups", self.n_groups)
        return self

    @property
    def asked_batch_size(self) -> int | None:
        return self.batch_size or None

    @property
    @abstractmethod
    def receiver(self) -> str | None:
        """The url of whoever is sent the values."""

    def terms(self) -> dict[str, JsonValue]:
        """By what values are reported."""
        return {}

    def config(self, model: str, batch_size: int) -> RoundConfig:
        return RoundConfig(
            model=model,
            spec=self.spec(),
            block_height=self.block_height,
            node_id=self.node_id,
            node_count=self.node_count,
            group_id=self.group_id,
            n_groups=self.n_groups,
            batch_size=batch_size,
            url=self.receiver,
            terms=self.terms(),
        )


class SequenceRoundBody(PlacedRoundBody):
    """A round over a node's nonce sequence, of one model, in batches."""

    params: Params
    url: HttpUrl = Field(default=None, description="The artifacts are sent to {url}/generated.")

    @property
    def served_model(self) -> str:
        return self.params.model

    @property
    def receiver(self) -> str | None:
        return self.url

    @classmethod
    def of(cls, config: RoundConfig) -> dict[str, Any]:
        spec = config.spec
        return {
            **cls.common_of(config),
            "params": {"model": config.model, "seq_len": spec.seq_len, **cls.params_of(spec)},
            **cls.beside_params_of(spec),
            "url": config.url,
        }

    @classmethod
    @abstractmethod
    def params_of(cls, spec: ProofSpec) -> dict[str, Any]:
        """The keys of `params` that are the scheme's own."""

    @classmethod
    def beside_params_of(cls, spec: ProofSpec) -> dict[str, Any]:
        """The keys beside `params` that are the scheme's own."""
        return {}


class BatchBody(BaseModel, ABC):
    """POST /validate: values that a round reported, to be judged by the round's terms."""

    examples: ClassVar[Examples] = {}
    answer: ClassVar[type[BaseModel]]  # as OpenAPI shows it

    @abstractmethod
    def job(self, config: RoundConfig) -> NewJob:
        """The job that judges the values; its nonces may be none."""


def check_claimed(artifacts: Sequence[Mapping[str, object]], nonces: Sequence[int]) -> None:
    """ClaimsError unless the `nonce`s of the artifacts are `nonces`, each once, in any order."""
    if len(artifacts) != len(nonces) or {artifact["nonce"] for artifact in artifacts} != set(
        nonces
    ):
        raise ClaimsError(
            "validation.artifacts must hold exactly one artifact for each of nonces, and no others;"
            " they differ."
        )
