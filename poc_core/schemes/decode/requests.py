"""The request bodies of decode proofs. A decode proof is a chain of points."""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, FailFast, Field, JsonValue

from poc_core import errors, fields
from poc_core.records import ProofSpec
from poc_core.schemes import requests
from poc_core.schemes.artifact.requests import ReceivedArtifact
from poc_core.schemes.artifact.terms import ReceivedStatTest
from poc_core.schemes.decode.options import MARGIN, DecodeOptions

# Most claimed points of a request. They are sent to the engines as part of the spec.
MOST_CLAIMED_POINTS = 500_000
# Replaces a claimed point that is not a small integer.
_NO_POINT = -1

CHAIN_EXAMPLE = [3, 14, 10, 12, 13]


class DecodeParams(requests.Params):
    """Inputs of chains. Unknown fields are refused.

    A body requests chains by either of the fields `scheme` and `decode`.
    """

    k_dim: fields.Count = Field(
        default=12, ge=1, description="Returned in `encoding`; has no effect."
    )
    scheme: Literal["prefill", "decode"] = Field(default="prefill", description="decode: chains.")
    decode: bool = Field(default=False, description="true: chains.")
    max_tokens: fields.Count = Field(ge=1, description="Steps after the prefill.")


def _points(claimed: Any) -> Any:
    """Returns a claimed chain. Replaces one that is no list by a chain of the wrong length."""
    return claimed if claimed is None or isinstance(claimed, list) else [_NO_POINT]


Points = Annotated[list[Any], BeforeValidator(_points)]


class DecodeArtifact(ReceivedArtifact):
    """A nonce's chain: the points of its prefill and of each step. `vector_b64` has no effect."""

    k_points_steps: NotRequired[Points | None]


class DecodeValidation(BaseModel):
    artifacts: Annotated[list[DecodeArtifact], FailFast()]


class DecodeBody(requests.JobBody):
    """A request to compute chains of nonces or, with `validation`, to check claimed chains."""

    params: DecodeParams
    batch_size: fields.Count | None = Field(
        default=None,
        ge=0,
        le=fields.MAX_BATCH_SIZE,
        description="Nonces per batch; 0 or absent: POC_BATCH_SIZE_DEFAULT.",
    )
    per_nonce_reflection: bool = Field(
        default=False,
        description="true: each nonce has its own reflections, which changes the chains.",
    )
    validation: DecodeValidation | None = Field(
        default=None, description="Chains to check instead of computing new ones."
    )
    enforced_k_steps: dict[fields.Nonce, Points] | None = Field(
        default=None, description="The claims, if they are not in `validation`."
    )
    stat_test: ReceivedStatTest | None = Field(default=None, description="Terms of the validation.")

    examples: ClassVar[requests.Examples] = {
        "decode": {
            "summary": "Compute chains of points",
            "value": {
                **requests.PLACE_EXAMPLE,
                "nonces": [0, 1, 2],
                "params": {
                    "model": "tiny-qwen3-256",
                    "seq_len": 32,
                    "decode": True,
                    "max_tokens": 4,
                },
                "wait": True,
            },
        }
    }

    def spec(self) -> ProofSpec:
        claims = self._enforced
        enforced = None if claims is None else {str(nonce): one for nonce, one in claims.items()}
        return _spec(self, enforced)

    def terms(self, honour_p_value_threshold: bool) -> dict[str, JsonValue]:
        test = self.stat_test or ReceivedStatTest(dist_threshold=MARGIN)
        return test.applied(honour_p_value_threshold).model_dump()

    def claims(self) -> dict[int, JsonValue] | None:
        # The claimed points are in the spec.
        return None if self._enforced is None else dict.fromkeys(self._enforced, True)

    @cached_property
    def _enforced(self) -> dict[int, list[int]] | None:
        """The claimed points of each nonce; None if none are claimed. ClaimsError if the claims'
        nonces differ from `nonces`, or a claim has no points. BodyError if there are more than
        MOST_CLAIMED_POINTS points.
        """
        if self.validation is None:
            return None
        artifacts = self.validation.artifacts
        requests.check_claimed(artifacts, self.nonces)
        claimed = {
            artifact["nonce"]: artifact.get("k_points_steps") or [] for artifact in artifacts
        }
        if self.enforced_k_steps is not None:
            if self.enforced_k_steps.keys() != set(self.nonces):
                raise errors.ClaimsError(
                    "enforced_k_steps must hold the points of each of nonces, and of no others."
                )
            claimed = self.enforced_k_steps
        elif not all(claimed.values()):
            raise errors.ClaimsError(
                "Each of validation.artifacts must have its k_points_steps, or send"
                " enforced_k_steps."
            )
        n_points = sum(map(len, claimed.values()))
        if n_points > MOST_CLAIMED_POINTS:
            raise errors.BodyError(
                f"The request claims {n_points} points; send at most {MOST_CLAIMED_POINTS} at a"
                " time",
                ("validation", "artifacts"),
                "too_long",
            )
        return {nonce: [_point(point) for point in points] for nonce, points in claimed.items()}


class DecodeRoundBody(requests.SequenceRoundBody):
    """A request to start a round of chains. Unknown fields are ignored, except in `params`."""

    params: DecodeParams
    batch_size: Annotated[fields.Count, Field(ge=0)] | None = Field(
        default=None, description="Batch size of the client's own counting; 0: none."
    )
    per_nonce_reflection: bool = Field(
        default=False,
        description="true: each nonce has its own reflections, which changes the chains.",
    )

    examples: ClassVar[requests.Examples] = {
        "decode": {
            "summary": "Chains of points",
            "value": {
                **requests.PLACE_EXAMPLE,
                "params": {
                    "model": "tiny-qwen3-256",
                    "seq_len": 256,
                    "decode": True,
                    "max_tokens": 256,
                },
                "url": "http://127.0.0.1:9100",
            },
        }
    }

    def spec(self) -> ProofSpec:
        return _spec(self)

    @classmethod
    def params_of(cls, spec: ProofSpec) -> dict[str, Any]:
        options = DecodeOptions.of(spec)
        return {
            "k_dim": options.k_dim,
            "scheme": "decode",
            "decode": True,
            "max_tokens": options.max_tokens,
        }

    @classmethod
    def beside_params_of(cls, spec: ProofSpec) -> dict[str, Any]:
        return {"per_nonce_reflection": DecodeOptions.of(spec).per_nonce_reflection}


def _point(claimed: Any) -> int:
    """Returns a claimed point if it is an integer from 0 to 255, or else _NO_POINT."""
    return claimed if type(claimed) is int and 0 <= claimed <= 255 else _NO_POINT


def _spec(
    body: DecodeBody | DecodeRoundBody, enforced: dict[str, list[int]] | None = None
) -> ProofSpec:
    params = body.params
    options = DecodeOptions(
        max_tokens=params.max_tokens,
        per_nonce_reflection=body.per_nonce_reflection,
        k_dim=params.k_dim,
        enforced=enforced,
    )
    return ProofSpec(
        scheme="decode",
        block_hash=body.block_hash,
        public_key=body.public_key,
        seq_len=params.seq_len,
        options=options.model_dump(exclude={"stepwise"}),  # not available to clients
    )
