"""The bodies that ask for artifacts."""

from typing import Annotated, Any, ClassVar, NotRequired, Self

from pydantic import BaseModel, BeforeValidator, FailFast, Field, JsonValue, model_validator
from typing_extensions import TypedDict

from poc_core.errors import ClaimsError
from poc_core.fields import Count, HttpUrl, Nonce, Probability, check_id
from poc_core.records import ProofSpec, RoundConfig
from poc_core.schemes.artifact.options import ArtifactOptions
from poc_core.schemes.artifact.terms import StatTest
from poc_core.schemes.requests import Examples, JobBody, Params, RoundBody

VECTOR_EXAMPLE = "kLLvNnktsS7BJk80ODL5KZezZDPHsTC1"


class ArtifactParams(Params):
    """What the artifacts are computed with; a field that is not listed here is refused."""

    k_dim: Count = Field(12, ge=1, description="Numbers per vector, at most the model's hidden size.")


class Artifact(TypedDict):
    """A nonce's vector: k_dim float16 numbers, little-endian, in base64."""

    # A dict and not a model: a request brings up to 100,000 of them.
    nonce: Nonce
    vector_b64: str


def _text(vector: object) -> str:
    return vector if isinstance(vector, str) else ""


class ReceivedArtifact(TypedDict):
    """A nonce's vector as somebody sent it. Whatever is no vector mismatches."""

    nonce: Nonce
    vector_b64: NotRequired[Annotated[str, BeforeValidator(_text)]]


class Validation(BaseModel):
    """Artifacts to be checked, one for each of the request's nonces."""

    artifacts: Annotated[list[ReceivedArtifact], FailFast()]


class ReceivedStatTest(StatTest):
    """When a validation calls the artifacts a fraud (protocol.md, section 2, Validation)."""

    p_value_threshold: Probability | None = Field(
        None,
        description="Another fraud_threshold, which is ignored unless POC_HONOUR_P_VALUE_THRESHOLD=true and "
        "fraud_threshold is absent.",
    )

    def applied(self, honour_p_value_threshold: bool) -> StatTest:
        fraud_threshold = self.fraud_threshold
        if honour_p_value_threshold and "fraud_threshold" not in self.model_fields_set:
            fraud_threshold = fraud_threshold if self.p_value_threshold is None else self.p_value_threshold
        return StatTest(dist_threshold=self.dist_threshold, p_mismatch=self.p_mismatch, fraud_threshold=fraud_threshold)


class GenerateBody(JobBody):
    """A request to compute the artifacts of given nonces or, with `validation`, to check somebody's artifacts
    for them.

    Unknown fields are ignored, but for those in `params`.
    """

    params: ArtifactParams
    validation: Validation | None = Field(None, description="Artifacts to check instead of computing new ones.")
    stat_test: ReceivedStatTest | None = Field(None, description="When a validation calls the artifacts a fraud.")
    poc_stronger_rng: bool = Field(False, description="Inputs from eight seeds per nonce instead of one.")

    examples: ClassVar[Examples] = {
        "generate": {
            "summary": "Compute artifacts",
            "value": {
                "block_hash": "block-1",
                "block_height": 1,
                "public_key": "key-1",
                "node_id": 0,
                "node_count": 1,
                "nonces": [0, 1, 2],
                "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
                "wait": True,
            },
        },
        "validate": {
            "summary": "Validate somebody's artifacts",
            "value": {
                "block_hash": "block-1",
                "block_height": 1,
                "public_key": "key-1",
                "node_id": 0,
                "node_count": 1,
                "nonces": [0],
                "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
                "validation": {"artifacts": [{"nonce": 0, "vector_b64": VECTOR_EXAMPLE}]},
                "stat_test": {"dist_threshold": 0.02, "p_mismatch": 0.001, "fraud_threshold": 0.01},
                "wait": False,
            },
        },
    }

    def spec(self) -> ProofSpec:
        return _spec(self.block_hash, self.public_key, self.params, self.poc_stronger_rng)

    def terms(self) -> dict[str, JsonValue]:
        return self._stat_test(honour_p_value_threshold=False)

    def chains_terms(self) -> dict[str, JsonValue]:
        return self._stat_test(honour_p_value_threshold=True)

    def _stat_test(self, honour_p_value_threshold: bool) -> dict[str, JsonValue]:
        return (self.stat_test or ReceivedStatTest()).applied(honour_p_value_threshold).model_dump()

    def claims(self) -> dict[int, JsonValue] | None:
        if self.validation is None:
            return None
        artifacts = self.validation.artifacts
        length = base64_length(self.params.k_dim)
        claimed: dict[int, JsonValue] = {}
        for artifact in artifacts:
            vector = artifact.get("vector_b64", "")
            # One that is no vector by its length mismatches anyway, and is not worth megabytes of Redis' memory.
            claimed[artifact["nonce"]] = vector if len(vector) == length else ""
        if len(artifacts) != len(self.nonces) or claimed.keys() != set(self.nonces):
            raise ClaimsError(
                "validation.artifacts must hold exactly one artifact for each of nonces, and no others; they differ."
            )
        return claimed


class ArtifactRoundBody(RoundBody):
    """Starts a round of artifacts. Unknown fields are ignored, but for those in `params`."""

    node_id: Count = Field(ge=0, description="This node, from 0 to node_count - 1.")
    node_count: Count = Field(ge=1, description="Nodes that share the nonces.")
    group_id: Count = Field(0, ge=0, description="This group, from 0 to n_groups - 1.")
    n_groups: Count = Field(1, ge=1, description="Groups that share the node's nonces.")
    # Bounded by what the workers hold, which only their registry knows.
    batch_size: Annotated[Count, Field(ge=1)] | None = Field(
        None, description="As the client counts; workers compute as many nonces at a time as fit."
    )
    params: ArtifactParams
    url: HttpUrl = Field(None, description="The artifacts are sent to {url}/generated.")
    poc_stronger_rng: bool = Field(False, description="Inputs from eight seeds per nonce instead of one.")

    examples: ClassVar[Examples] = {
        "artifacts": {
            "summary": "Artifacts",
            "value": {
                "block_hash": "block-1",
                "block_height": 1,
                "public_key": "key-1",
                "node_id": 0,
                "node_count": 1,
                "batch_size": 32,
                "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
                "url": "http://127.0.0.1:9100",
            },
        },
    }

    @model_validator(mode="after")
    def _ids_below_counts(self) -> Self:
        check_id("node_id", self.node_id, "node_count", self.node_count)
        check_id("group_id", self.group_id, "n_groups", self.n_groups)
        return self

    @property
    def served_model(self) -> str:
        return self.params.model

    @property
    def asked_batch_size(self) -> int | None:
        return self.batch_size

    def spec(self) -> ProofSpec:
        return _spec(self.block_hash, self.public_key, self.params, self.poc_stronger_rng)

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
            url=self.url,
        )

    @classmethod
    def of(cls, config: RoundConfig) -> dict[str, Any]:
        spec, options = config.spec, ArtifactOptions.of(config.spec)
        return {
            "block_hash": spec.block_hash,
            "block_height": config.block_height,
            "public_key": spec.public_key,
            "node_id": config.node_id,
            "node_count": config.node_count,
            "batch_size": config.batch_size,
            "group_id": config.group_id,
            "n_groups": config.n_groups,
            "params": {"model": config.model, "seq_len": spec.seq_len, "k_dim": options.k_dim},
            "poc_stronger_rng": options.stronger_rng,
            "url": config.url,
        }


def base64_length(k_dim: int) -> int:
    """Characters of a vector_b64."""
    return (2 * k_dim + 2) // 3 * 4


def _spec(block_hash: str, public_key: str, params: ArtifactParams, stronger_rng: bool) -> ProofSpec:
    return ProofSpec(
        scheme="artifact",
        block_hash=block_hash,
        public_key=public_key,
        seq_len=params.seq_len,
        options=ArtifactOptions(k_dim=params.k_dim, stronger_rng=stronger_rng).model_dump(),
    )
