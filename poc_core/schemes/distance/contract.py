"""The contract of distance proofs (protocol.md, sections 3, 5 and 6)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import JsonValue

from poc_core import records
from poc_core.arithmetic.statistics import binomial_p_value
from poc_core.schemes.contract import Contract, Pair, Reported, noise
from poc_core.schemes.distance.answers import DistanceStatus
from poc_core.schemes.distance.options import (
    FRAUD_THRESHOLD,
    DistanceOptions,
    DistanceTerms,
)
from poc_core.schemes.distance.requests import DistanceRoundBody, ProofBatchBody

# The probability that an honest pair is found invalid (section 3, Fraud).
P_INVALID = 5e-4


@dataclass(frozen=True)
class DistanceVerdict:
    """The verdict on claimed (nonce, distance) pairs: `n_invalid` of `n_total` are invalid."""

    n_total: int
    n_invalid: int
    probability_honest: float  # probability that an honest sender has at least n_invalid
    fraud_detected: bool


class DistanceContract(Contract):
    name = "distance"
    options = DistanceOptions
    terms = DistanceTerms
    round_body = DistanceRoundBody
    batch_body = ProofBatchBody
    marks = ("r_target",)
    lists_reported = True
    status_fields = DistanceStatus
    status_without_round: ClassVar[Mapping[str, JsonValue]] = {
        "valid_nonces": [],
        "valid_distances": [],
        "valid_from": 0,
        "total_checked": 0,
        "total_valid": 0,
        "elapsed_seconds": 0.0,
        "rate_per_second": 0.0,
        "r_target": None,
    }
    column = "distance"

    def is_reported(self, value: JsonValue, terms: Mapping[str, JsonValue]) -> bool:
        """Returns True if the nonce is valid: its distance is below the r_target of `terms`."""
        return isinstance(value, float) and value < DistanceTerms.model_validate(terms).r_target

    def status(
        self, record: records.RoundRecord, reported: Reported, elapsed_s: float, rate: float
    ) -> dict[str, Any]:
        return {
            "valid_nonces": [nonce for nonce, _ in reported.pairs],
            "valid_distances": [dist for _, dist in reported.pairs],
            "valid_from": reported.first,
            "total_checked": record.n_processed,
            "total_valid": record.n_valid,
            "elapsed_seconds": elapsed_s,
            "rate_per_second": rate,
            "r_target": record.config.terms["r_target"],
        }

    def about(self, spec: records.ProofSpec, terms: Mapping[str, JsonValue]) -> dict[str, Any]:
        return {"r_target": terms["r_target"]} if terms else {}

    def bytes_per_artifact(self, spec: records.ProofSpec) -> int:
        return 128  # a nonce and four numbers in a ValidatedBatch

    def artifact(self, nonce: int, value: JsonValue) -> dict[str, JsonValue]:
        return {"nonce": nonce, "dist": value}

    def values(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        return {"nonces": [nonce for nonce, _ in pairs], "dist": [value for _, value in pairs]}

    def verdict(
        self,
        spec: records.ProofSpec,
        request: records.JobRequest,
        nonces: Sequence[int],
        values: Sequence[Any],
        claims: Sequence[Any],
    ) -> dict[str, Any]:
        """Returns the fields of a ValidatedBatch (protocol.md, section 3)."""
        terms = DistanceTerms.model_validate(request.terms)
        verdict = judge_distances(claims, values, terms.r_target, terms.fraud_threshold)
        return {
            "status": "OK",
            "fraud_detected": verdict.fraud_detected,
            "computed_distances": values,
            "public_key": spec.public_key,
            "block_hash": spec.block_hash,
            "block_height": request.block_height,
            "nonces": nonces,
            "dist": values,
            "node_id": request.node_id,
            "received_dist": claims,
            "r_target": terms.r_target,
            "fraud_threshold": terms.fraud_threshold,
            "n_invalid": verdict.n_invalid,
            "probability_honest": verdict.probability_honest,
            "n_excluded": values.count(None),
            "seq_len": spec.seq_len,
        }

    def synthetic_values(
        self, spec: records.ProofSpec, nonces: Sequence[int], hidden_size: int
    ) -> list[JsonValue]:
        DistanceOptions.checked(spec, hidden_size)
        text = spec.model_dump_json()
        # The spread of real distances, so that values lie on both sides of any r_target in use.
        return [float(math.sqrt(2) + 0.03 * noise(text, nonce, 1)[0]) for nonce in nonces]

    def cell(self, value: float) -> str:
        return f"{value:.6f}"

    def described(self, body: Mapping[str, Any]) -> str:
        return f"distances below {body['r_target']}"

    def reported_of(self, status: Mapping[str, Any]) -> str:
        return f"{status['total_valid']:,} of them below r_target {status['r_target']}"


def judge_distances(
    received: Sequence[float],
    computed: Sequence[float | None],
    r_target: float,
    fraud_threshold: float = FRAUD_THRESHOLD,
) -> DistanceVerdict:
    """Compares another node's distances with this node's distances. Returns the verdict.

    `computed`: this node's distances of the same nonces; None for an excluded nonce, which does not
    count in n_total. ValueError if the lengths differ.
    """
    pairs = [(dist, own) for dist, own in zip(received, computed, strict=True) if own is not None]
    # `not <` instead of `>=`, so that NaN is invalid too.
    n_invalid = sum(not dist < r_target or not own <= r_target for dist, own in pairs)
    probability_honest = binomial_p_value(n_invalid, len(pairs), P_INVALID)
    return DistanceVerdict(
        n_total=len(pairs),
        n_invalid=n_invalid,
        probability_honest=probability_honest,
        fraud_detected=len(pairs) > 0 and probability_honest < fraud_threshold,
    )


CONTRACT = DistanceContract()
