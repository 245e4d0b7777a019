"""protocol.md, section 8, against the reference's numbers."""

import json
from typing import Any

import pytest
import torch

from poc_core.arithmetic import reflections, rng
from poc_core.schemes.decode import steps
from poc_core.schemes.decode.codebook_file import DIM, POINTS
from tests.harness.golden import ROOT

GOLDEN: dict[str, Any] = json.loads((ROOT / "tests/data/golden/decode-primitives.json").read_text())
CPU = torch.device("cpu")


def cases(name: str) -> Any:
    return pytest.mark.parametrize(
        "case", GOLDEN[name], ids=lambda case: str(case.get("nonce", case.get("base", "")))
    )


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def at(case: Any) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Where in its chain a case is: base seed, step, and the point before."""
    return tensor(case["base"]), case["step"], tensor(case["prev_k"])


@cases("base_seed")
def test_base_seeds_are_the_references(case: Any) -> None:
    found = steps.base_seeds(case["block_hash"], case["public_key"], [case["nonce"]], CPU)
    assert found.tolist() == [case["seed"]]


@cases("step_seed")
@pytest.mark.parametrize("purpose", ["embed", "pick", "token"])
def test_step_seeds_are_the_references(case: Any, purpose: Any) -> None:
    assert steps.step_seeds(*at(case), purpose).tolist() == [case[purpose]]


@cases("pseudo_token_id")
def test_token_ids_of_steps_are_the_references(case: Any) -> None:
    found = steps.step_token_ids(*at(case), case["vocab"])
    assert (found.tolist(), found.dtype) == ([case["id"]], torch.int32)


@cases("decode_input")
def test_inputs_of_steps_are_the_references(case: Any) -> None:
    found = steps.step_inputs(*at(case), case["hidden"], torch.float32)
    torch.testing.assert_close(found[0], torch.tensor(case["values"]), rtol=0, atol=1e-5)


def test_inputs_of_a_tensor_of_seeds_are_those_of_the_same_integers() -> None:
    seeds = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    found = rng.normal(torch.tensor(seeds), 37, CPU)
    assert torch.equal(found, rng.normal(seeds, 37, CPU))


@cases("pick_0")
def test_the_prefills_picks_are_the_references(case: Any) -> None:
    found = steps.first_picks(
        case["block_hash"], case["public_key"], [case["nonce"]], case["hidden"], CPU
    )
    assert found[0].tolist() == case["indices"]


@cases("pick_t")
def test_a_steps_picks_are_the_references(case: Any) -> None:
    assert steps.step_picks(*at(case), case["hidden"])[0].tolist() == case["indices"]


@cases("snap")
def test_snaps_are_the_references(case: Any) -> None:
    seed = int(case["hidden_state"].removeprefix("normal(").partition(",")[0])
    state = rng.normal([seed], case["hidden"], CPU)
    found = steps.snap(state, steps.step_picks(*at(case), case["hidden"]))
    torch.testing.assert_close(found.scores[0], torch.tensor(case["scores"]), rtol=0, atol=2e-6)
    assert found.points.tolist() == [case["k"]]


def test_of_several_best_points_the_lowest_is_taken() -> None:
    # A state without any direction.
    found = steps.snap(torch.zeros(1, DIM), torch.arange(DIM)[None])
    assert (found.points.tolist(), found.scores.tolist()) == ([0], [[0.0] * POINTS])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_has_no_point(bad: float) -> None:
    states = torch.ones(2, DIM)
    states[1, 7] = bad
    found = steps.snap(states, torch.arange(DIM).expand(2, DIM))
    assert found.points.tolist()[1] == steps.NO_POINT
    assert found.points.tolist()[0] >= 0
    assert found.scores[1].isnan().all()


@cases("claimed_margin")
def test_margins_of_claims_are_the_references(case: Any) -> None:
    found = steps.claimed_margins(torch.tensor([case["scores"]]), tensor(case["claim"]))
    assert found.tolist() == pytest.approx([case["margin"]])


def test_a_claim_that_is_no_point_has_the_largest_margin() -> None:
    found = steps.claimed_margins(torch.zeros(3, POINTS), torch.tensor([-1, POINTS, POINTS + 1]))
    assert found.tolist() == [2.0, 2.0, 2.0]


@cases("routing")
def test_experts_are_the_references(case: Any) -> None:
    seeds = steps.route_seeds(case["block_hash"], [case["nonce"]], case["moe_layer"], CPU)
    first = steps.first_experts(seeds, case["step"], case["experts"])
    assert first.tolist() == [case["start"]]
    logits = steps.forced_logits(first, case["experts"], case["top_k"], torch.bfloat16)
    assert logits[0].topk(case["top_k"]).indices.tolist() == case["chosen"]


@cases("forced_logits")
def test_forced_logits_are_the_references(case: Any) -> None:
    first = steps.first_experts(tensor(case["seed"]), case["step"], case["experts"])
    found = steps.forced_logits(first, case["experts"], case["top_k"], torch.float32)
    assert found[0].tolist() == case["logits"]


@cases("per_nonce_householder")
def test_reflections_of_a_nonces_own_are_the_references(case: Any) -> None:
    found = reflections.householder_vectors([case["seed_string"]], case["dim"], CPU)
    torch.testing.assert_close(found[0], torch.tensor(case["values"]), rtol=0, atol=1e-5)
