"""What goes into each pass of a micro-batch and what comes out, without a model."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from poc_core.arithmetic import reflections, rng
from poc_core.records import ProofSpec
from poc_core.schemes.base import Batch, load_scheme
from tests.harness.samples import known

HIDDEN, SEQ_LEN, STEPS = 256, 6, 4
CPU = torch.device("cpu")
NONCES = [3, 14, 15, 92, 65]


def batch_of(
    part: int | None = None, scheme: str = "decode", reflected: bool = True, **options: Any
) -> Batch:
    needed = {"max_tokens": STEPS} if scheme == "decode" else {}
    spec = ProofSpec(
        scheme=scheme, block_hash="b", public_key="k", seq_len=SEQ_LEN, options=needed | options
    )
    loaded = load_scheme(spec, hidden_size=HIDDEN, n_layers=2, device=CPU, dtype=torch.float32)
    return loaded.begin(NONCES, part, reflected)


def run(batch: Batch) -> list[Any]:
    """A "model" that adds up what it has seen of each nonce, transforming once."""
    seen: dict[int, Tensor] = {}
    for step in range(batch.order.n_passes):
        rows = batch.inputs(step).view(
            len(batch.order.members(step)), len(batch.order.positions(step)), HIDDEN
        )
        assert batch.order.n_tokens(step) == rows.shape[0] * rows.shape[1]
        sums = torch.stack(
            [
                rows[i].cumsum(0) + seen.get(place, 0)
                for i, place in enumerate(batch.order.members(step))
            ]
        )
        seen |= {place: sums[i, -1] for i, place in enumerate(batch.order.members(step))}
        transform = known(batch.transform(step))
        (states,) = transform.transform_terms(1, [sums.view(-1, HIDDEN)])
        batch.take(step, states.view(sums.shape))
    return batch.values(batch.numbers())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("part", [1, 2, 4, 5, 9])
def test_a_prefill_in_parts_gives_the_chains_of_one_at_once(part: int, own: bool) -> None:
    expected = run(batch_of(None, per_nonce_reflection=own))
    batch = batch_of(part, per_nonce_reflection=own)
    assert batch.order.n_passes == -(-len(NONCES) // part) + STEPS
    assert run(batch) == expected
    assert [len(chain) for chain in expected] == [STEPS + 1] * len(NONCES)


@pytest.mark.parametrize("own", [False, True])
def test_claims_are_judged_in_one_pass_as_step_by_step(own: bool) -> None:
    chains = run(batch_of(None, per_nonce_reflection=own))
    chains[2][1] = (chains[2][1] + 1) % 16
    claims: dict[str, Any] = {
        "enforced": {str(nonce): chain for nonce, chain in zip(NONCES, chains, strict=True)}
    }
    at_once = batch_of(None, per_nonce_reflection=own, **claims)
    in_steps = batch_of(2, per_nonce_reflection=own, stepwise=True, **claims)
    assert (at_once.order.n_passes, in_steps.order.n_passes) == (1, 3 + STEPS)
    found, expected = run(at_once), run(in_steps)
    assert [value[0] for value in found] == [value[0] for value in expected]
    assert [value[1] for value in found] == pytest.approx(
        [value[1] for value in expected], abs=1e-6
    )
    assert found[2][0] >= 1
    assert found[0] == [0, 0.0]


@pytest.mark.parametrize("n_steps", [3, 4])
def test_a_claim_of_another_length_is_wrong(n_steps: int) -> None:
    chains = run(batch_of(max_tokens=n_steps))
    chains[1] = chains[1][:-1]
    claims = {str(nonce): chain for nonce, chain in zip(NONCES, chains, strict=True)}
    found = run(batch_of(max_tokens=n_steps, enforced=claims))
    assert [value[0] for value in found] == [0, n_steps + 1, 0, 0, 0]


def test_passes_are_parts_and_then_steps() -> None:
    batch = batch_of(2)
    assert [batch.order.members(step) for step in range(4)] == [
        range(2),
        range(2, 4),
        range(4, 5),
        range(5),
    ]
    assert [batch.order.positions(step) for step in (0, 2, 3, 6)] == [
        range(6),
        range(6),
        range(6, 7),
        range(9, 10),
    ]
    assert [batch.order.has_points_after(step) for step in range(7)] == [
        False,
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    assert [batch.order.is_last(step) for step in range(7)] == [False] * 6 + [True]


def test_experts_of_a_part_are_those_of_its_nonces() -> None:
    whole, parts = batch_of(), batch_of(2)
    every = whole.first_experts(0, 1, 8)
    found = [parts.first_experts(step, 1, 8) for step in range(3)]
    assert every is not None
    assert torch.equal(torch.cat([one for one in found if one is not None]), every)
    # t = 0 for all rows of a prefill.
    assert every.view(len(NONCES), SEQ_LEN).unique(dim=1).shape == (len(NONCES), 1)
    step = known(parts.first_experts(4, 1, 8))
    assert step.shape == (len(NONCES),)


def seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def hashed(key: int, seed: int) -> int:
    """hash(i, seed) of the protocol's section 1, in integers."""
    key = key * 0xCC9E2D51 % 2**32
    h = seed ^ (key << 15 | key >> 17) % 2**32 * 0x1B873593 % 2**32
    h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def expected_ids(nonce: int, points: list[int], vocab: int) -> list[int]:
    """Of a prefill and of the steps that follow points, by section 8.2's words."""
    first = seed_of(f"b_k_nonce{nonce}_input_ids")
    ids = [hashed(position, first) % vocab for position in range(SEQ_LEN)]
    for t, k in enumerate(points, start=1):
        mixed = (k * 0x9E3779B1 + t * 0x85EBCA77 + 0x57) % 2**32
        ids.append(hashed(0, hashed(mixed, seed_of(f"b_k_nonce{nonce}"))) % vocab)
    return ids


@pytest.mark.parametrize("vocab", [512, 129_280])
@pytest.mark.parametrize("part", [None, 2])
def test_token_ids_follow_the_points_and_claims_in_their_place(
    part: int | None, vocab: int
) -> None:
    """Own points, claims step by step, and claims in one forward."""
    free = batch_of(part)
    found: list[Tensor] = []
    states = torch.randn(
        len(NONCES), SEQ_LEN + STEPS, HIDDEN, generator=torch.Generator().manual_seed(1)
    )
    for step in range(free.order.n_passes):
        found.append(free.token_ids(step, vocab))
        members, positions = free.order.members(step), free.order.positions(step)
        free.take(step, states[members.start : members.stop, positions.start : positions.stop])
    chains: Any = free.values(free.numbers())
    assert len({tuple(chain) for chain in chains}) > 1
    n_parts = free.order.n_parts
    rows = [
        *torch.cat(found[:n_parts]).view(len(NONCES), SEQ_LEN).T,
        *found[n_parts:],
    ]
    assert torch.stack(rows, dim=1).tolist() == [
        expected_ids(nonce, chain[:-1], vocab) for nonce, chain in zip(NONCES, chains, strict=True)
    ]
    assert all(ids.dtype == torch.int32 for ids in found)

    claims = {
        str(nonce): [(k + 1) % 16 for k in chain]
        for nonce, chain in zip(NONCES, chains, strict=True)
    }
    claimed = [expected_ids(nonce, claims[str(nonce)][:-1], vocab) for nonce in NONCES]
    at_once = batch_of(enforced=claims).token_ids(0, vocab)
    assert at_once.view(len(NONCES), -1).tolist() == claimed
    stepwise = batch_of(part, enforced=claims, stepwise=True)
    for step in range(n_parts):
        members = stepwise.order.members(step)
        stepwise.take(step, states[members.start : members.stop, :SEQ_LEN])
    assert stepwise.token_ids(n_parts, vocab).tolist() == [ids[SEQ_LEN] for ids in claimed]


def test_the_hashes_of_a_step_lead_to_its_first_experts() -> None:
    batch = batch_of()
    assert [step for step in range(batch.order.n_passes) if batch.order.is_step(step)] == [
        1,
        2,
        3,
        4,
    ]
    for moe_layers, step in ((range(3), 1), (range(3), 4), (range(2), 2), (range(1, 3), 3)):
        hashes = batch.route_hashes(step, moe_layers)
        assert hashes.shape == (len(moe_layers), len(NONCES))
        for layer, row in zip(moe_layers, hashes, strict=True):
            expected = known(batch.first_experts(step, layer, 48))
            assert torch.equal(row % 48, expected)


def test_vectors_of_each_nonces_own_are_none_of_the_batch() -> None:
    shared, own = batch_of(), batch_of(per_nonce_reflection=True)
    assert shared.layer_vectors is not None
    assert shared.layer_vectors.shape == (2, HIDDEN)
    assert own.layer_vectors is None
    names = [f"b_nonce{nonce}_layer_1_householder" for nonce in NONCES]
    vectors = reflections.householder_vectors(names, HIDDEN, CPU)[:, None]
    x = torch.randn(len(NONCES), SEQ_LEN, HIDDEN, generator=torch.Generator().manual_seed(0))
    (found,) = known(own.transform(0)).transform_terms(1, [x.view(-1, HIDDEN)])
    (shaped,) = known(own.transform(0)).transform_terms(1, [x])
    assert torch.equal(shaped.view(-1, HIDDEN), found)
    assert torch.equal(found.view(x.shape), reflections.reflect(x, vectors))


def test_a_prefill_has_the_inputs_of_its_nonces_and_the_point_of_its_last_row() -> None:
    whole, last = batch_of(), batch_of()
    inputs = rng.inputs("b", "k", NONCES, SEQ_LEN, HIDDEN, CPU, torch.float32)
    assert torch.equal(whole.inputs(0).view(inputs.shape), inputs)
    whole.take(0, inputs)
    last.take(0, inputs[:, -1:])
    assert torch.equal(whole.points, last.points)


def test_numbers_of_a_prefill_are_of_its_last_row() -> None:
    whole, last = batch_of(scheme="artifact"), batch_of(scheme="artifact")
    states = torch.randn(len(NONCES), SEQ_LEN, HIDDEN, generator=torch.Generator().manual_seed(0))
    whole.take(0, states)
    last.take(0, states[:, -1:])
    assert torch.equal(whole.numbers(), last.numbers())


def test_the_first_stage_goes_on_from_points_that_the_last_one_found() -> None:
    last, first = batch_of(), batch_of()
    states = torch.randn(len(NONCES), SEQ_LEN, HIDDEN, generator=torch.Generator().manual_seed(0))
    last.take(0, states)
    first.follow(last.points)
    assert torch.equal(first.inputs(1), last.inputs(1))


def test_a_prefill_is_one_pass_and_transformed_only_where_its_model_is() -> None:
    batch = batch_of(scheme="artifact")
    assert (batch.order.n_passes, batch.seeds_experts) == (1, False)
    assert batch.transform(0) is batch.scheme
    assert batch_of(scheme="artifact", reflected=False).transform(0) is None
    # A chain's layers are reflected in every model.
    assert batch_of(reflected=False).transform(0) is not None
