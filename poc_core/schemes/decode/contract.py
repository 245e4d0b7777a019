"""Decode proofs as all but the engines see them (protocol.md, section 8)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from poc_core.arithmetic.nonces import MAX_NONCE
from poc_core.errors import BodyError
from poc_core.records import JobRequest, ModelInfo, Passes, ProofSpec
from poc_core.schemes.artifact.answers import Encoding
from poc_core.schemes.artifact.terms import StatTest
from poc_core.schemes.contract import Contract
from poc_core.schemes.decode.answers import DECODE_EXAMPLES, DecodeResult, DecodeValidationResult
from poc_core.schemes.decode.options import PICKED, DecodeOptions
from poc_core.schemes.decode.requests import DecodeBody, DecodeRoundBody
from poc_core.schemes.noise import noise

# The margin of invented chains that differ.
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

    def limits(self, spec: ProofSpec, info: ModelInfo) -> dict[str, tuple[int, int]]:
        passes, field = self.passes(spec), ("params", "max_tokens")
        n_tokens = passes.positions
        if refusal := self.why_not(info):
            raise BodyError(refusal, ("params", "decode"), "no_decode")
        if n_tokens > info.max_seq_len:
            raise BodyError(
                f"seq_len and max_tokens are {n_tokens} together; the model takes"
                f" {info.max_seq_len}",
                field,
                "too_long",
            )
        if passes.rows > info.max_batch_tokens >= spec.seq_len:
            raise BodyError(
                f"A nonce takes {passes.rows} tokens of one forward; the model takes"
                f" {info.max_batch_tokens}",
                ("params", "seq_len"),
                "too_long",
            )
        if (
            passes.steps
            and info.kept_tokens is not None
            and info.kept_by_nonce(n_tokens) > info.kept_tokens
        ):
            raise BodyError(
                f"seq_len and max_tokens are {n_tokens} together; there is memory for"
                f" {info.kept_tokens} (--decode-memory-gb)",
                field,
                "too_long",
            )
        return super().limits(spec, info)

    def why_not(self, info: ModelInfo) -> str:
        if info.hidden_size < PICKED:
            return (
                f"Decode proofs need a hidden size of {PICKED}; this model's is {info.hidden_size}."
            )
        return info.no_chains

    def passes(self, spec: ProofSpec) -> Passes:
        light = spec.model_copy(update={"options": {**spec.options, "enforced": None}})
        options = DecodeOptions.checked(light, PICKED)
        if spec.options.get("enforced") is None or options.stepwise:
            return Passes(spec.seq_len, options.max_tokens)
        return Passes(spec.seq_len + options.max_tokens)

    def about(self, spec: ProofSpec, terms: Mapping[str, JsonValue]) -> dict[str, Any]:
        return {"encoding": Encoding(k_dim=DecodeOptions.of(spec).k_dim).model_dump()}

    def bytes_per_artifact(self, spec: ProofSpec) -> int:
        n_steps = DecodeOptions.of(spec).max_tokens + 1
        return len(
            self.artifacts_json([b"%d" % MAX_NONCE], [b"[%s]" % b",".join([b"15"] * n_steps)])
        )

    def artifact(self, nonce: int, value: JsonValue) -> dict[str, JsonValue]:
        return {"nonce": nonce, "vector_b64": "", "k_points_steps": value}

    def verdict(
        self,
        spec: ProofSpec,
        request: JobRequest,
        nonces: Sequence[int],
        values: Sequence[Any],
        claims: Sequence[Any],
    ) -> dict[str, Any]:
        from poc_core.schemes.decode.verdict import judge  # here: scipy's time, where nobody judges

        test = StatTest.model_validate(request.terms)
        return judge(nonces, values, DecodeOptions.of(spec).max_tokens + 1, test)

    def synthetic_values(
        self, spec: ProofSpec, nonces: Sequence[int], hidden_size: int
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


CONTRACT = DecodeContract()
