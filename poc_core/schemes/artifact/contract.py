"""The contract of artifact proofs (protocol.md, sections 2, 5 and 6)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from poc_core import records
from poc_core.fields import MAX_NONCE
from poc_core.schemes.artifact.answers import (
    RESULT_EXAMPLES,
    ArtifactResult,
    Encoding,
    ValidationResult,
)
from poc_core.schemes.artifact.options import ArtifactOptions
from poc_core.schemes.artifact.requests import ArtifactRoundBody, GenerateBody, base64_length
from poc_core.schemes.artifact.terms import ArtifactTerms
from poc_core.schemes.contract import Contract, noise


class ArtifactContract(Contract):
    name = "artifact"
    options = ArtifactOptions
    terms = ArtifactTerms
    job_body = GenerateBody
    round_body = ArtifactRoundBody
    result_models = (ArtifactResult, ValidationResult)
    result_examples = RESULT_EXAMPLES
    column = "vector_b64"

    def limits(
        self, spec: records.ProofSpec, info: records.ModelInfo
    ) -> dict[str, tuple[int, int]]:
        k_dim = ArtifactOptions.of(spec).k_dim
        return super().limits(spec, info) | {"k_dim": (k_dim, info.hidden_size)}

    def about(self, spec: records.ProofSpec, terms: Mapping[str, JsonValue]) -> dict[str, Any]:
        """Returns the field `encoding`, which describes vector_b64."""
        return {"encoding": Encoding(k_dim=ArtifactOptions.of(spec).k_dim).model_dump()}

    def bytes_per_artifact(self, spec: records.ProofSpec) -> int:
        vector = "A" * base64_length(ArtifactOptions.of(spec).k_dim)
        return len(self.artifacts_json([b"%d" % MAX_NONCE], [b'"%s"' % vector.encode()]))

    def artifact(self, nonce: int, value: JsonValue) -> dict[str, JsonValue]:
        return {"nonce": nonce, "vector_b64": value}

    def artifacts_json(self, nonces: Sequence[bytes], values: Sequence[bytes]) -> bytes:
        # The texts are joined without parsing them, because there may be 100,000 vectors.
        pairs = zip(nonces, values, strict=True)
        return b"[" + b",".join(b'{"nonce":%s,"vector_b64":%s}' % pair for pair in pairs) + b"]"

    def verdict(
        self,
        spec: records.ProofSpec,
        request: records.JobRequest,
        nonces: Sequence[int],
        values: Sequence[Any],
        claims: Sequence[Any],
    ) -> dict[str, Any]:
        from poc_core.schemes.artifact.verdict import compare  # imported here: numpy takes 25 MB

        terms = ArtifactTerms.model_validate(request.terms)
        verdict = compare(
            computed=dict(zip(nonces, values, strict=True)),
            received=dict(zip(nonces, claims, strict=True)),
            k_dim=ArtifactOptions.of(spec).k_dim,
            test=terms,
        )
        return verdict.model_dump() | {"terms": terms.source}

    def synthetic_values(
        self, spec: records.ProofSpec, nonces: Sequence[int], hidden_size: int
    ) -> list[JsonValue]:
        import numpy as np

        from poc_core.schemes.artifact.encoding import encode_vectors

        k_dim = ArtifactOptions.checked(spec, hidden_size).k_dim
        text = spec.model_dump_json()
        vectors = np.reshape([noise(text, nonce, k_dim) for nonce in nonces], (-1, k_dim))
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        return list(encode_vectors(vectors / (norms + 1e-8)))

    def described(self, body: Mapping[str, Any]) -> str:
        return f"k_dim {body['params']['k_dim']}"


CONTRACT = ArtifactContract()
