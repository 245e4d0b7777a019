"""The request bodies of artifact proofs."""

from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    JsonValue,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from poc_core import fields
from poc_core.records import ProofSpec
from poc_core.schemes import requests
from poc_core.schemes.artifact.options import ArtifactOptions
from poc_core.schemes.artifact.terms import ReceivedStatTest, network_terms

VECTOR_EXAMPLE = "kLLvNnktsS7BJk80ODL5KZezZDPHsTC1"


def _values(names: str) -> WrapValidator:
    """Errors name the values of all schemes, because a value of neither scheme comes here too."""

    def checked(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": names}
            ) from None

    return WrapValidator(checked)


class ArtifactParams(requests.Params):
    """Inputs of artifacts. Unknown fields are refused."""

    k_dim: fields.Count = Field(
        default=12, ge=1, description="Numbers per vector, at most the model's hidden size."
    )
    # For clients that distinguish artifacts from decode proofs.
    scheme: Annotated[Literal["prefill"], _values("'prefill' or 'decode'")] = Field(
        default="prefill", description="The scheme's name in the network."
    )
    decode: Annotated[Literal[False], _values("true or false")] = Field(
        default=False, description="False: no decode steps."
    )
    max_tokens: fields.Count = Field(default=0, ge=0, description="Only for decode proofs.")


class Artifact(TypedDict):
    """A nonce and its vector: k_dim float16 numbers, little-endian, in base64."""

    # A dict instead of a model, because a request has up to 100,000 artifacts.
    nonce: fields.Nonce
    vector_b64: str


def _text(vector: object) -> str:
    return vector if isinstance(vector, str) else ""


class ReceivedArtifact(TypedDict):
    """A nonce and its claimed vector. An unreadable vector counts as a mismatch."""

    nonce: fields.Nonce
    vector_b64: NotRequired[Annotated[str, BeforeValidator(_text)]]


class Validation(BaseModel):
    """Artifacts to check, one for each of the request's nonces."""

    artifacts: Annotated[list[ReceivedArtifact], FailFast()]


class GenerateBody(requests.JobBody):
    """A request to compute artifacts of nonces or, with `validation`, to check claimed artifacts.
    Unknown fields are ignored, except in `params`.
    """

    params: ArtifactParams
    validation: Validation | None = Field(
        default=None, description="Artifacts to check instead of computing new ones."
    )
    stat_test: ReceivedStatTest | None = Field(default=None, description="Terms of the validation.")
    poc_stronger_rng: bool = Field(
        default=False, description="true: each nonce's input has eight seeds instead of one."
    )

    examples: ClassVar[requests.Examples] = {
        "generate": {
            "summary": "Compute artifacts",
            "value": {
                **requests.PLACE_EXAMPLE,
                "nonces": [0, 1, 2],
                "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
                "wait": True,
            },
        },
        "validate": {
            "summary": "Validate somebody's artifacts",
            "value": {
                **requests.PLACE_EXAMPLE,
                "nonces": [0],
                "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
                "validation": {"artifacts": [{"nonce": 0, "vector_b64": VECTOR_EXAMPLE}]},
                "stat_test": {"dist_threshold": 0.02, "p_mismatch": 0.001, "fraud_threshold": 0.01},
                "wait": False,
            },
        },
    }

    def spec(self) -> ProofSpec:
        return _spec(self)

    def terms(self, honour_p_value_threshold: bool) -> dict[str, JsonValue]:
        test, usual = self.stat_test or ReceivedStatTest(), network_terms(self.params.model)
        return test.applied(honour_p_value_threshold, usual).model_dump()

    def claims(self) -> dict[int, JsonValue] | None:
        if self.validation is None:
            return None
        artifacts = self.validation.artifacts
        requests.check_claimed(artifacts, self.nonces)
        length = base64_length(self.params.k_dim)
        claimed = {artifact["nonce"]: artifact.get("vector_b64", "") for artifact in artifacts}
        # A vector of the wrong length is a mismatch in any case, and may have megabytes.
        return {nonce: one if len(one) == length else "" for nonce, one in claimed.items()}


class ArtifactRoundBody(requests.SequenceRoundBody):
    """A request to start a round of artifacts. Unknown fields are ignored, except in `params`."""

    params: ArtifactParams
    poc_stronger_rng: bool = Field(
        default=False, description="true: each nonce's input has eight seeds instead of one."
    )

    examples: ClassVar[requests.Examples] = {
        "artifacts": {
            "summary": "Artifacts",
            "value": {
                **requests.PLACE_EXAMPLE,
                "batch_size": 32,
                "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
                "url": "http://127.0.0.1:9100",
            },
        }
    }

    def spec(self) -> ProofSpec:
        return _spec(self)

    @classmethod
    def params_of(cls, spec: ProofSpec) -> dict[str, Any]:
        return {"k_dim": ArtifactOptions.of(spec).k_dim}

    @classmethod
    def beside_params_of(cls, spec: ProofSpec) -> dict[str, Any]:
        return {"poc_stronger_rng": ArtifactOptions.of(spec).stronger_rng}


def base64_length(k_dim: int) -> int:
    """Returns the number of characters of a vector_b64 that has k_dim numbers of two bytes."""
    return (2 * k_dim + 2) // 3 * 4


def _spec(body: GenerateBody | ArtifactRoundBody) -> ProofSpec:
    options = ArtifactOptions(k_dim=body.params.k_dim, stronger_rng=body.poc_stronger_rng)
    return ProofSpec(
        scheme="artifact",
        block_hash=body.block_hash,
        public_key=body.public_key,
        seq_len=body.params.seq_len,
        options=options.model_dump(),
    )
