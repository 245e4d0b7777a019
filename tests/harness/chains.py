"""The reference's chains of points, and how far an engine may leave them."""

from typing import Any

from poc_core.records import ProofSpec
from tests.harness.golden import cases

# A float32 score lies this near the reference's: where the best two lie nearer, a chain may leave.
NEAR_TIE = 1e-4


def golden(model: str, kind: str, dtype: str = "float32") -> list[dict[str, Any]]:
    """The reference's cases. `kind`: "decode" or "validation"; `model`: its name or directory."""
    return cases(model.rpartition("/")[2], kind, "decode-cpu", dtype)


def spec_of(case: dict[str, Any], **options: Any) -> ProofSpec:
    return ProofSpec(
        scheme="decode",
        block_hash=case["block_hash"],
        public_key=case["public_key"],
        seq_len=case["seq_len"],
        options={"max_tokens": case["max_tokens"]} | options,
    )


def enforced_spec(case: dict[str, Any], **options: Any) -> ProofSpec:
    """The spec of a case with its chains as claims."""
    return spec_of(
        case,
        enforced={str(one["nonce"]): one["k_points_steps"] for one in case["artifacts"]},
        **options,
    )


def nonces_of(case: dict[str, Any]) -> list[int]:
    return [artifact["nonce"] for artifact in case["artifacts"]]


def stepwise(spec: ProofSpec) -> ProofSpec:
    """The spec with its claims followed step by step."""
    return spec.model_copy(update={"options": {**spec.options, "stepwise": True}})


def assert_chains(found: list[Any], case: dict[str, Any]) -> None:
    """Asserts equal chains, to the first step where the reference itself was undecided."""
    for chain, expected in zip(found, case["artifacts"], strict=True):
        assert_chain(chain, expected["k_points_steps"], case["gaps"][str(expected["nonce"])])


def assert_chain(chain: Any, points: list[int], gaps: list[float]) -> None:
    """`gaps`: for each step, how much better its point is than the next best."""
    undecided = next((step for step, gap in enumerate(gaps) if gap < NEAR_TIE), len(points))
    assert chain[:undecided] == points[:undecided]
    assert len(chain) == len(points)
    assert undecided > 0


def assert_judged(found: list[Any], case: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Asserts that claims lie as far off as the reference found."""
    for value, expected in zip(found, case["expect"]["per_nonce"], strict=True):
        assert value[0] == expected["n_sphere_mismatches"]
        assert abs(value[1] - expected["mismatch_margin_max"]) <= tolerance
