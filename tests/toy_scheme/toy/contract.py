"""The half without torch."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, JsonValue

from poc_core.errors import ClaimsError
from poc_core.fields import Count, HttpUrl, Nonce
from poc_core.records import JobRequest, ModelInfo, ProofSpec, RoundConfig, RoundRecord
from poc_core.schemes.contract import Contract, Reported, noise
from poc_core.schemes.requests import JobBody, Options, Params, RoundBody, Terms


class ToyOptions(Options):
    n_steps: int = Field(3, ge=1, description="an integer above 0")


class ToyTerms(Terms):
    tolerated: int = 0  # steps of a nonce that may differ


class ToyParams(Params):
    scheme: Literal["toy", ""] = ""
    toy: bool = False
    n_steps: Count = Field(3, ge=1)


class ToyArtifact(BaseModel):
    nonce: Nonce
    vector_b64: str = ""
    steps: list[int]


class ToyValidation(BaseModel):
    artifacts: list[ToyArtifact]


class ToyBody(JobBody):
    params: ToyParams
    validation: ToyValidation | None = None
    enforced_steps: dict[Nonce, list[int]] | None = None
    tolerated: int = 0

    def spec(self) -> ProofSpec:
        return _spec(self.block_hash, self.public_key, self.params)

    def terms(self, honour_p_value_threshold: bool) -> dict[str, JsonValue]:
        return ToyTerms(tolerated=self.tolerated).model_dump()

    def claims(self) -> dict[int, JsonValue] | None:
        if self.validation is None:
            return None
        claimed: dict[int, Any] = {
            artifact.nonce: artifact.steps for artifact in self.validation.artifacts
        }
        claimed |= self.enforced_steps or {}
        if claimed.keys() != set(self.nonces):
            raise ClaimsError("The nonces differ.")
        return claimed


class ToyRoundBody(RoundBody):
    node_id: Count
    node_count: Count
    params: ToyParams
    at_most: int = 999
    url: HttpUrl = None

    @property
    def served_model(self) -> str:
        return self.params.model

    @property
    def requested_batch_size(self) -> int | None:
        return 4

    def spec(self) -> ProofSpec:
        return _spec(self.block_hash, self.public_key, self.params)

    def config(self, model: str, batch_size: int) -> RoundConfig:
        return RoundConfig(
            model=model,
            spec=self.spec(),
            block_height=self.block_height,
            node_id=self.node_id,
            node_count=self.node_count,
            batch_size=batch_size,
            url=self.url,
            terms={"at_most": self.at_most},
        )

    @classmethod
    def of(cls, config: RoundConfig) -> dict[str, Any]:
        return {
            "block_hash": config.spec.block_hash,
            "params": {"scheme": "toy", **config.spec.options},
        }


class ToyResult(BaseModel):
    status: Literal["completed"]
    artifacts: list[ToyArtifact]


class ToyStatus(BaseModel):
    toys_reported: int | None = None


class ToyContract(Contract):
    name = "toy"
    options = ToyOptions
    terms = ToyTerms
    job_body = ToyBody
    round_body = ToyRoundBody
    marks = ("params",)
    lists_reported = True
    status_fields = ToyStatus
    result_models = (ToyResult,)

    def recognises(self, marks: Mapping[str, Any]) -> bool:
        params = marks.get("params")
        return isinstance(params, dict) and (
            params.get("scheme") == "toy" or params.get("toy") is True
        )

    def limits(self, spec: ProofSpec, info: ModelInfo) -> dict[str, tuple[int, int]]:
        return super().limits(spec, info) | {"n_steps": (ToyOptions.of(spec).n_steps, 100)}

    def is_reported(self, value: JsonValue, terms: Mapping[str, Any]) -> bool:
        return isinstance(value, list) and value[0] <= terms["at_most"]

    def status(
        self, record: RoundRecord, reported: Reported, elapsed_s: float, rate: float
    ) -> dict[str, Any]:
        return {"toys_reported": len(reported.pairs)}

    def about(self, spec: ProofSpec, terms: Mapping[str, JsonValue]) -> dict[str, Any]:
        return {"n_steps": ToyOptions.of(spec).n_steps}

    def bytes_per_artifact(self, spec: ProofSpec) -> int:
        return 64 + 4 * ToyOptions.of(spec).n_steps

    def artifact(self, nonce: int, value: JsonValue) -> dict[str, JsonValue]:
        return {"nonce": nonce, "vector_b64": "", "steps": value}

    def verdict(
        self,
        spec: ProofSpec,
        request: JobRequest,
        nonces: Sequence[int],
        values: Sequence[Any],
        claims: Sequence[Any],
    ) -> dict[str, Any]:
        differing = [
            sum(a != b for a, b in zip(*pair, strict=True))
            for pair in zip(values, claims, strict=True)
        ]
        tolerated = ToyTerms.model_validate(request.terms).tolerated
        per_nonce = [
            {"nonce": nonce, "n_differing": n} for nonce, n in zip(nonces, differing, strict=True)
        ]
        return {"fraud_detected": max(differing) > tolerated, "per_nonce": per_nonce}

    def synthetic_values(
        self, spec: ProofSpec, nonces: Sequence[int], hidden_size: int
    ) -> list[JsonValue]:
        n_steps, text = ToyOptions.checked(spec, hidden_size).n_steps, spec.model_dump_json()
        return [[int(8 + 8 * x) for x in noise(text, nonce, n_steps)] for nonce in nonces]

    def cell(self, value: Any) -> str:
        return " ".join(map(str, value))


def _spec(block_hash: str, public_key: str, params: ToyParams) -> ProofSpec:
    options = ToyOptions(n_steps=params.n_steps).model_dump()
    return ProofSpec(
        scheme="toy",
        block_hash=block_hash,
        public_key=public_key,
        seq_len=params.seq_len,
        options=options,
    )


CONTRACT = ToyContract()
