"""Base classes of all schemes' request bodies, options and criteria (protocol.md, section 5).

Errors in a body are listed in the order of its fields.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from poc_core import errors, fields, records

# Examples for OpenAPI: name -> {"summary": ..., "value": a body or an answer}.
Examples = dict[str, dict[str, Any]]
# The first fields of example bodies.
PLACE_EXAMPLE = {
    "block_hash": "block-1",
    "block_height": 1,
    "public_key": "key-1",
    "node_id": 0,
    "node_count": 1,
}
REQUEST_ID_EXAMPLE = "0f2b6c1d9e4a4f0d8a7c5b3e1f2d4c6a"


class Options(BaseModel):
    """The inputs of a scheme besides block_hash, public_key and seq_len. This is the typed form of
    ProofSpec.options.

    The description of a field names its valid values. Errors quote the description, and replace
    {hidden_size} in it by the model's hidden size.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def of(cls, spec: records.ProofSpec) -> Self:
        """Returns the options of a spec that `checked` has accepted before."""
        return cls.model_validate(spec.options)

    @classmethod
    def checked(cls, spec: records.ProofSpec, hidden_size: int) -> Self:
        """Returns a spec's options. SpecError if an option is unknown, or invalid for the model."""
        try:
            return cls.model_validate(spec.options, context={"hidden_size": hidden_size})
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
        unknown = sorted(
            str(problem["loc"][0]) for problem in problems if problem["type"] == "extra_forbidden"
        )
        if unknown:
            known = ", ".join(sorted(cls.model_fields))
            raise errors.SpecError(
                f"The {spec.scheme} scheme has no option {', '.join(unknown)}; it knows {known}."
            )
        name = str(problems[0]["loc"][0])
        wanted = (cls.model_fields[name].description or "different").format(hidden_size=hidden_size)
        raise errors.SpecError(f"{name} must be {wanted}, not {repr(problems[0]['input'])[:80]}.")


class Terms(BaseModel):
    """The criteria for verdicts on claims, and for the nonces that a round reports. This is the
    typed form of JobRequest.terms and RoundConfig.terms.

    Unlike Options, criteria do not change the computed values.
    """

    model_config = ConfigDict(frozen=True)


class Params(BaseModel):
    """The inputs that determine the values of nonces. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    model: fields.Text = Field(
        description="The model's name as the workers serve it.", examples=["tiny-qwen3"]
    )
    seq_len: fields.Count = Field(
        ge=1, description="Positions of a nonce's prefill.", examples=[256]
    )


class Body(BaseModel, ABC):
    """The fields that request bodies of jobs and of rounds have in common."""

    examples: ClassVar[Examples] = {}

    block_hash: fields.Text = Field(
        description="Seeds the layers' reflections and, with public_key, the inputs."
    )
    block_height: fields.Count = Field(ge=0, description="Returned in callbacks.")
    public_key: fields.Text = Field(description="Public key of the node that computes the proofs.")

    @abstractmethod
    def spec(self) -> records.ProofSpec:
        """Returns the proof spec of the request. It determines the value of each nonce."""


class JobBody(Body):
    """The body of POST /generate: nonces to compute, or claimed values to check.

    Unknown fields are ignored, except in `params`.
    """

    # node_id may exceed node_count here, because validators send other nodes' ids.
    node_id: fields.Count = Field(ge=0, description="Returned in callbacks.")
    node_count: fields.Count = Field(ge=1, description="Nodes that share the nonces.")
    nonces: fields.Nonces = Field(min_length=1, description="The nonces to compute, each once.")
    params: Params
    batch_size: fields.Count | None = Field(
        default=None,
        ge=1,
        le=fields.MAX_BATCH_SIZE,
        description=(
            "Nonces per batch; default POC_BATCH_SIZE_DEFAULT. Workers with less memory get"
            " smaller batches."
        ),
    )
    wait: bool = Field(
        default=False,
        description="true: the answer is the result. false: the answer has a request_id.",
    )
    url: fields.HttpUrl = Field(
        default=None,
        description="Receiver of the result, at {url}/generated or {url}/validated.",
    )

    def terms(self, honour_p_value_threshold: bool) -> dict[str, JsonValue]:
        """Returns the criteria for a verdict on claims (see POC_HONOUR_P_VALUE_THRESHOLD)."""
        return {}

    def claims(self) -> dict[int, JsonValue] | None:
        """Returns the claimed value of each nonce; None if the request claims none. ClaimsError if
        the claims' nonces differ from `nonces`. An unreadable claim counts as a wrong claim,
        because with an error a cheater could make the validation fail.
        """
        return None


class RoundBody(Body):
    """The body of POST /init/generate. If the scheme's rounds have phases, also the body of POST
    /init and POST /init/validate.
    """

    @property
    @abstractmethod
    def served_model(self) -> str | None:
        """The requested model, or None if the body names no model and so means the only served
        model.
        """

    @property
    @abstractmethod
    def requested_batch_size(self) -> int | None:
        """The batch size that the body requests, or None to use POC_BATCH_SIZE_DEFAULT."""

    @abstractmethod
    def config(self, model: str, batch_size: int) -> records.RoundConfig:
        """Returns the round's configuration, with the model and batch size that the API chose."""

    @classmethod
    @abstractmethod
    def of(cls, config: records.RoundConfig) -> dict[str, Any]:
        """Returns a round's configuration as the fields of this body, for /status."""

    @staticmethod
    def common_of(config: records.RoundConfig) -> dict[str, Any]:
        """Returns the fields of a round's configuration that the bodies of all schemes share."""
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
    """The body of a round whose nonces are divided among nodes, and within a node among groups."""

    node_id: fields.Count = Field(ge=0, description="This node, from 0 to node_count - 1.")
    node_count: fields.Count = Field(ge=1, description="Nodes that share the nonces.")
    group_id: fields.Count = Field(
        default=0, ge=0, description="This group, from 0 to n_groups - 1."
    )
    n_groups: fields.Count = Field(
        default=1, ge=1, description="Groups that share the node's nonces."
    )
    # The upper limit depends on the workers, which only their registry knows.
    batch_size: Annotated[fields.Count, Field(ge=1)] | None = Field(
        default=None,
        description="Batch size of the client's own counting; workers compute as many nonces"
        " at a time as fit.",
    )

    @model_validator(mode="after")
    def _ids_below_counts(self) -> Self:
        fields.check_id("node_id", self.node_id, "node_count", self.node_count)
        fields.check_id("group_id", self.group_id, "n_groups", self.n_groups)
        return self

    @property
    def requested_batch_size(self) -> int | None:
        return self.batch_size or None

    @property
    @abstractmethod
    def receiver(self) -> str | None:
        """The url to which callbacks are sent, or None if no callbacks are sent."""

    def terms(self) -> dict[str, JsonValue]:
        """Returns the criteria for nonces that the round reports, and for verdicts on claims."""
        return {}

    def config(self, model: str, batch_size: int) -> records.RoundConfig:
        return records.RoundConfig(
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
    """The body of a round with the field `params`. Artifact proofs and decode proofs use it."""

    params: Params
    url: fields.HttpUrl = Field(
        default=None, description="The artifacts are sent to {url}/generated."
    )

    @property
    def served_model(self) -> str:
        return self.params.model

    @property
    def receiver(self) -> str | None:
        return self.url

    @classmethod
    def of(cls, config: records.RoundConfig) -> dict[str, Any]:
        spec = config.spec
        return {
            **cls.common_of(config),
            "params": {"model": config.model, "seq_len": spec.seq_len, **cls.params_of(spec)},
            **cls.beside_params_of(spec),
            "url": config.url,
        }

    @classmethod
    @abstractmethod
    def params_of(cls, spec: records.ProofSpec) -> dict[str, Any]:
        """Returns the `params` fields that only this scheme has, filled from `spec`."""

    @classmethod
    def beside_params_of(cls, spec: records.ProofSpec) -> dict[str, Any]:
        """Returns the fields outside `params` that only this scheme has, filled from `spec`."""
        return {}


class BatchBody(BaseModel, ABC):
    """The body of POST /validate: claimed values to check by the criteria of the current round."""

    examples: ClassVar[Examples] = {}
    answer: ClassVar[type[BaseModel]]  # for OpenAPI

    @abstractmethod
    def job(self, config: records.RoundConfig) -> records.NewJob:
        """Returns the job that checks the claims. The job may have no nonces."""


def check_claimed(artifacts: Sequence[Mapping[str, object]], nonces: Sequence[int]) -> None:
    """Raises ClaimsError unless `artifacts` has exactly one artifact for each of `nonces`."""
    found = {artifact["nonce"] for artifact in artifacts}
    if len(artifacts) != len(nonces) or found != set(nonces):
        raise errors.ClaimsError(
            "validation.artifacts must hold exactly one artifact for each of nonces, and no others;"
            " they differ."
        )
