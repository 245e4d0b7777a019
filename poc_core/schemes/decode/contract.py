"""The contract of decode proofs (protocol.md, section 8)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from poc_core import records
from poc_core.arithmetic.statistics import binomial_p_value
from poc_core.fields import MAX_NONCE
from poc_core.schemes.artifact.answers import Encoding
from poc_core.schemes.artifact.terms import StatTest
from poc_core.schemes.contract import Contract, noise
from poc_core.schemes.decode.answers import DECODE_EXAMPLES, DecodeResult, DecodeValidationResult
from poc_core.schemes.decode.limits import ChainLimits, refusal
from poc_core.schemes.decode.options import DecodeOptions, passes_of
from poc_core.schemes.decode.requests import DecodeBody, DecodeRoundBody

# The margin in synthetic values of a claimed chain that differs.
_SYNTHETIC_MARGIN = 0.1


class DecodeContract(Contract):
    name = "decode"
    options = DecodeOptions
    terms = StatTest
    job_body = DecodeBody
    round_body = DecodeRoundBody
    marks = ("params",)
    result_models = (DecodeResult, DecodeValidationResult)
    result_examples = DECODE_EXAMPLES
    column = "k_points_steps"

    def recognises(self, marks: Mapping[str, Any]) -> bool:
        params = marks.get("params")
        return isinstance(params, dict) and (
            params.get("scheme") == "decode" or params.get("decode") is True
        )

    def limits(
        self, spec: records.ProofSpec, info: records.ModelInfo
    ) -> dict[str, tuple[int, int]]:
        if (error := refusal(spec, info)) is not None:
            raise error
        return super().limits(spec, info)

    def why_not(self, spec: records.ProofSpec, info: records.ModelInfo) -> str:
        return str(refusal(spec, info) or "")

    def common(self, infos: Sequence[records.ModelInfo]) -> dict[str, JsonValue]:
        return ChainLimits.common(infos).model_dump()

    def max_batch(self, spec: records.ProofSpec, info: records.ModelInfo) -> int:
        return ChainLimits.of(info).max_batch(spec, info)

    def halved(
        self, spec: records.ProofSpec, n: int, part: int, info: records.ModelInfo
    ) -> records.ModelInfo:
        less, limits = super().halved(spec, n, part, info), ChainLimits.of(info)
        if limits.kept_tokens is None or not limits.step_positions(spec):
            return less
        kept = min(limits.kept_tokens, n // 2 * limits.step_positions(spec))
        return limits.model_copy(update={"kept_tokens": kept}).on(less)

    def passes(self, spec: records.ProofSpec) -> records.Passes:
        return passes_of(spec)

    def about(self, spec: records.ProofSpec, terms: Mapping[str, JsonValue]) -> dict[str, Any]:
        return {"encoding": Encoding(k_dim=DecodeOptions.of(spec).k_dim).model_dump()}

    def bytes_per_artifact(self, spec: records.ProofSpec) -> int:
        n_steps = DecodeOptions.of(spec).max_tokens + 1
        return len(
            self.artifacts_json([b"%d" % MAX_NONCE], [b"[%s]" % b",".join([b"15"] * n_steps)])
        )

    def artifact(self, nonce: int, value: JsonValue) -> dict[str, JsonValue]:
        return {"nonce": nonce, "vector_b64": "", "k_points_steps": value}

    def verdict(
        self,
        spec: records.ProofSpec,
        request: records.JobRequest,
        nonces: Sequence[int],
        values: Sequence[Any],
        claims: Sequence[Any],
    ) -> dict[str, Any]:
        test = StatTest.model_validate(request.terms)
        return judge(nonces, values, DecodeOptions.of(spec).max_tokens + 1, test)

    def synthetic_values(
        self, spec: records.ProofSpec, nonces: Sequence[int], hidden_size: int
    ) -> list[JsonValue]:
        options = DecodeOptions.checked(spec, hidden_size)
        text = spec.model_copy(
            update={"options": {**spec.options, "enforced": None}}
        ).model_dump_json()
        chains = [
            [int(8 + 8 * x) for x in noise(text, nonce, options.max_tokens + 1)] for nonce in nonces
        ]
        if options.enforced is None:
            return [list(chain) for chain in chains]
        values: list[JsonValue] = []
        for nonce, chain in zip(nonces, chains, strict=True):
            claimed = options.enforced[str(nonce)]
            n = sum(a != b for a, b in zip(chain, claimed, strict=False)) + abs(
                len(chain) - len(claimed)
            )
            values.append([n, _SYNTHETIC_MARGIN if n else 0.0])
        return values

    def cell(self, value: Any) -> str:
        return " ".join(map(str, value))

    def described(self, body: Mapping[str, Any]) -> str:
        return f"decode, {body['params']['max_tokens']} steps"


def judge(
    nonces: Sequence[int], found: Sequence[tuple[int, float] | None], n_steps: int, test: StatTest
) -> dict[str, Any]:
    """Decides whether claimed chains are fraud (section 8.3). Returns the fields of the verdict.

    `found`: for each nonce, the number of claimed points that differ from this node's points, and
    the largest margin among them; None if this node did not compute the nonce. `n_steps`: the
    number of points of a chain. `test`: the criteria.
    """
    per_nonce = [
        {
            "nonce": nonce,
            "n_sphere_mismatches": one[0],
            "n_steps": n_steps,
            "mismatch_margin_max": one[1],
            "mismatch": one[0] > 0 and one[1] > test.dist_threshold,
        }
        for nonce, one in zip(nonces, found, strict=True)
        if one is not None
    ]
    mismatches = [one["nonce"] for one in per_nonce if one["mismatch"]]
    excluded = [nonce for nonce, one in zip(nonces, found, strict=True) if one is None]
    p_value = binomial_p_value(len(mismatches), len(per_nonce), test.p_mismatch)
    return {
        "n_total": len(per_nonce),
        "n_mismatch": len(mismatches),
        "mismatch_nonces": mismatches,
        "p_value": p_value,
        "fraud_detected": bool(per_nonce) and p_value < test.fraud_threshold,
        "fraud_threshold": test.fraud_threshold,
        "n_excluded": len(excluded),
        "excluded_nonces": excluded,
        "per_nonce": per_nonce,
    }


CONTRACT = DecodeContract()
