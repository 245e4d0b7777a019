"""Judging chains against the reference's verdicts, and the invented chains of synthetic engines."""

from typing import Any

import pytest

from poc_core.records import JobRequest, ProofSpec
from poc_core.schemes.artifact.terms import StatTest
from poc_core.schemes.decode.contract import CONTRACT, judge
from tests.harness.golden import cases

MODELS = ["tiny-qwen3-256", "tiny-qwen3-moe-256"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("index", range(7))
def test_verdicts_are_the_references(model: str, index: int) -> None:
    case = cases(model, "validation", "decode-cpu")[index]
    expected = case["expect"]
    found: list[tuple[int, float] | None] = [
        (one["n_sphere_mismatches"], one["mismatch_margin_max"]) for one in expected["per_nonce"]
    ]
    nonces = [artifact["nonce"] for artifact in case["artifacts"]]
    verdict = judge(
        nonces, found, case["max_tokens"] + 1, StatTest.model_validate(case["stat_test"])
    )
    assert verdict.pop("p_value") == pytest.approx(expected.pop("p_value"), rel=1e-6)
    assert verdict == expected | {"fraud_threshold": case["stat_test"]["fraud_threshold"]}


def test_nonces_that_could_not_be_computed_leave_the_sample() -> None:
    verdict = judge([3, 5, 8], [(0, 0.0), None, (2, 0.3)], 5, StatTest())
    assert (verdict["n_total"], verdict["n_excluded"], verdict["excluded_nonces"]) == (2, 1, [5])
    assert verdict["mismatch_nonces"] == [8]


def test_nothing_computed_is_no_fraud() -> None:
    verdict = judge([1], [None], 5, StatTest())
    assert (verdict["p_value"], verdict["fraud_detected"]) == (1.0, False)


@pytest.mark.parametrize(("margin", "mismatch"), [(0.02, False), (0.0201, True)])
def test_a_margin_at_the_threshold_is_none(margin: float, mismatch: bool) -> None:
    assert judge([1], [(1, margin)], 5, StatTest())["per_nonce"][0]["mismatch"] is mismatch


def test_a_p_value_at_the_threshold_is_no_fraud() -> None:
    p_value = judge([1], [(2, 0.3)], 5, StatTest())["p_value"]
    for threshold, is_fraud in ((p_value, False), (p_value * 1.001, True)):
        verdict = judge([1], [(2, 0.3)], 5, StatTest(fraud_threshold=threshold))
        assert verdict["fraud_detected"] is is_fraud


def spec(**options: Any) -> ProofSpec:
    return ProofSpec(
        scheme="decode",
        block_hash="b",
        public_key="k",
        seq_len=8,
        options={"max_tokens": 9} | options,
    )


def test_invented_chains_agree_with_themselves_only() -> None:
    chains: Any = CONTRACT.synthetic_values(spec(), [1, 2, 3], 256)
    assert all(len(chain) == 10 and set(chain) <= set(range(16)) for chain in chains)
    claimed = {"1": chains[0], "2": [*chains[1][:-1], (chains[1][-1] + 1) % 16], "3": chains[2][:4]}
    values = CONTRACT.synthetic_values(spec(enforced=claimed), [1, 2, 3], 256)
    first: Any = values[0]
    assert first == [0, 0.0]
    request = JobRequest(block_height=1, node_id=0, node_count=1)
    verdict = CONTRACT.verdict(spec(enforced=claimed), request, [1, 2, 3], values, [True] * 3)
    assert verdict["mismatch_nonces"] == [2, 3]


def test_an_artifact_is_no_larger_than_announced() -> None:
    artifacts = CONTRACT.artifacts_json([b"1"], [b"[" + b",".join([b"15"] * 10) + b"]"])
    assert len(artifacts) <= CONTRACT.bytes_per_artifact(spec())
