"""Decode proofs on real vLLM engines: the reference's chains, whatever else the engine does
meanwhile.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue

from bench.families.checks import greedy
from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.terms import StatTest
from poc_core.schemes.decode.codebook_file import SHIPPED_SHA256
from poc_core.schemes.decode.contract import judge
from poc_core.schemes.decode.limits import ChainLimits
from tests.harness.chains import (
    assert_chain,
    assert_chains,
    assert_judged,
    enforced_spec,
    golden,
    nonces_of,
    spec_of,
    stepwise,
)
from tests.harness.chat_beside import answers_alone_and_beside
from tests.harness.marks import needs_vllm
from tests.stacks.deployments import DECODE, DECODE_BFLOAT16
from workers.engines.base import Engine, MicroBatch, Slice, Tick
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("engines"), needs_vllm]

engines = pytest.mark.parametrize("vllm_engine", DECODE, indirect=True, ids=str, scope="session")
# What chat may meet: on CPUs vLLM has no buffers for a later stage's chat.
chatting = pytest.mark.parametrize(
    "vllm_engine", DECODE[:4], indirect=True, ids=str, scope="session"
)
bfloat16 = pytest.mark.parametrize(
    "vllm_engine", DECODE_BFLOAT16, indirect=True, ids=str, scope="session"
)

# A margin of one rounding of bfloat16 and another (0.0025 was seen), and what honest nodes are
# granted.
BFLOAT16_MARGIN, HONEST_MARGIN = 0.01, 0.025


def random_claims(case: dict[str, Any], n: int, seed: int) -> ProofSpec:
    """Of nonces 0 .. n-1."""
    chance = random.Random(seed)
    claims = {
        str(nonce): [chance.randrange(16) for _ in range(case["max_tokens"] + 1)]
        for nonce in range(n)
    }
    return spec_of(case, enforced=claims)


@engines
class TestChains:
    @pytest.mark.parametrize("index", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
    def test_they_are_the_references(self, vllm_engine: Engine, index: int) -> None:
        case = golden(vllm_engine.info.name, "decode")[index]
        assert_chains(compute_all(vllm_engine, spec_of(case), nonces_of(case)), case)

    def test_they_depend_neither_on_their_batch_nor_on_its_size(
        self, vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = golden(vllm_engine.info.name, "decode")[0]
        nonces = [*nonces_of(case)[::-1], 1000, 1001, 1002]
        small = dataclasses.replace(vllm_engine.info, max_batch_tokens=3 * case["seq_len"])
        monkeypatch.setattr(vllm_engine, "info", small)
        found = dict(zip(nonces, compute_all(vllm_engine, spec_of(case), nonces), strict=True))
        assert_chains([found[nonce] for nonce in nonces_of(case)], case)

    def test_they_do_not_depend_on_where_they_are_cut(self, vllm_engine: Engine) -> None:
        """A call for each layer of each step; with several stages two micro-batches meet there."""
        case = golden(vllm_engine.info.name, "decode")[1]
        nonces, plan = nonces_of(case), SlicePlan(0.0, 1)
        assert_chains(compute_all(vllm_engine, spec_of(case), nonces, plan), case)

    def test_claims_lie_as_far_off_as_the_reference_finds_in_one_forward_and_step_by_step(
        self, vllm_engine: Engine
    ) -> None:
        for case in golden(vllm_engine.info.name, "validation"):
            spec, nonces = enforced_spec(case), nonces_of(case)
            assert_judged(compute_all(vllm_engine, spec, nonces), case)
            assert_judged(compute_all(vllm_engine, stepwise(spec), nonces), case)

    def test_one_forward_in_slices_judges_as_a_whole_one(self, vllm_engine: Engine) -> None:
        spec = random_claims(golden(vllm_engine.info.name, "decode")[0], 5, seed=1)
        assert compute_all(vllm_engine, spec, range(5), SlicePlan(0.0, 1)) == compute_all(
            vllm_engine, spec, range(5)
        )

    def test_reflections_of_each_nonces_own_change_them(self, vllm_engine: Engine) -> None:
        case = golden(vllm_engine.info.name, "decode")[0]
        own: list[Any] = compute_all(
            vllm_engine, spec_of(case, per_nonce_reflection=True), nonces_of(case)[:2]
        )
        shared: list[Any] = compute_all(vllm_engine, spec_of(case), nonces_of(case)[:2])
        assert all(one != other for one, other in zip(own, shared, strict=True))
        enforced = dict(zip(map(str, nonces_of(case)), own, strict=False))
        again = spec_of(case, per_nonce_reflection=True, enforced=enforced)
        judged: list[Any] = compute_all(vllm_engine, again, nonces_of(case)[:2])
        assert [value[1] for value in judged] == pytest.approx([0, 0], abs=1e-4)

    def test_more_positions_than_memory_is_kept_for_are_refused(self, vllm_engine: Engine) -> None:
        kept = ChainLimits.of(vllm_engine.info).kept_tokens
        assert kept is not None
        assert ChainLimits.of(vllm_engine.info).codebook == SHIPPED_SHA256
        assert kept >= 1024
        spec = ProofSpec(
            scheme="decode",
            block_hash="b",
            public_key="k",
            seq_len=64,
            options={"max_tokens": kept},
        )
        with pytest.raises(SpecError, match="positions"):
            compute_all(vllm_engine, spec, [0])

    def test_one_that_is_given_up_frees_its_place(self, vllm_engine: Engine) -> None:
        case = golden(vllm_engine.info.name, "decode")[0]
        stage = vllm_engine.stages[0]
        for own in range(3_000_000, 3_000_003):  # more than there are places
            begin = [MicroBatch(spec_of(case), nonces_of(case), id=own)]
            vllm_engine.tick(Tick(begin, [Slice(own, 0, stage.stop)], wait=True))
            vllm_engine.tick(Tick(drop=[own]))
        found = compute_all(vllm_engine, spec_of(case), nonces_of(case)[:1])
        expected = case["artifacts"][0]
        assert_chain(found[0], expected["k_points_steps"], case["gaps"][str(expected["nonce"])])


@chatting
def test_chat_and_other_proofs_between_two_steps_change_nothing(vllm_engine: Engine) -> None:
    """Neither the chain nor the answers; the state of the chain waits on the device meanwhile."""
    case = golden(vllm_engine.info.name, "decode")[0]
    spec, nonces = spec_of(case), nonces_of(case)
    other, others = ProofSpec(block_hash="other", public_key="key", seq_len=64), range(5)
    expected, alone, n_layers = (
        compute_all(vllm_engine, other, others),
        greedy(vllm_engine),
        vllm_engine.info.n_layers,
    )
    values: dict[int, Sequence[JsonValue]] = {}
    own, between = 1_000_000, 2_000_000
    for step in range(case["max_tokens"] + 1):
        begin = [MicroBatch(spec, nonces, id=own)] if step == 0 else []
        values |= vllm_engine.tick(
            Tick(begin, [Slice(own, 0, n_layers, step, step + 1)], wait=True)
        ).values
        if step % 6 == 0:
            assert greedy(vllm_engine) == alone, f"after step {step}"
            begin = [MicroBatch(other, others, id=between + step)]
            values |= vllm_engine.tick(
                Tick(begin, [Slice(between + step, 0, n_layers)], wait=True)
            ).values
            assert values[between + step] == expected
    assert_chains(list(values[own]), case)


@pytest.mark.slow
@engines
def test_one_forward_judges_500_random_cases_as_step_by_step(vllm_engine: Engine) -> None:
    test = StatTest(dist_threshold=0.025, p_mismatch=0.1, fraud_threshold=0.01)
    case = golden(vllm_engine.info.name, "decode")[0]
    for seed in range(5):
        spec, nonces = random_claims(case, 100, seed), range(100)
        at_once: list[Any] = compute_all(vllm_engine, spec, nonces)
        in_steps: list[Any] = compute_all(vllm_engine, stepwise(spec), nonces)
        assert [one[1] for one in at_once] == pytest.approx([one[1] for one in in_steps], abs=1e-5)
        verdicts = [
            judge(nonces, values, case["max_tokens"] + 1, test) for values in (at_once, in_steps)
        ]
        for verdict in verdicts:
            del verdict["per_nonce"]
        assert verdicts[0] == verdicts[1]


@pytest.mark.slow
@bfloat16
def test_bfloat16_follows_the_float32_chains_within_the_margin_of_honest_nodes(
    vllm_engine: Engine,
) -> None:
    """Forced along the golden chains, which a free one would leave at its first near tie."""
    margins: list[float] = []
    for case in golden(vllm_engine.info.name, "decode"):
        found: list[Any] = compute_all(vllm_engine, enforced_spec(case), nonces_of(case))
        margins += [value[1] for value in found]
    print(
        f"bfloat16 of {vllm_engine.info.name}: margins {np.mean(margins):.5f} mean,"
        f" {max(margins):.5f} largest"
    )
    assert max(margins) <= HONEST_MARGIN


@pytest.mark.slow
@bfloat16
def test_bfloat16_follows_the_references_bfloat16_chains(vllm_engine: Engine) -> None:
    for case in golden(vllm_engine.info.name, "decode", "bfloat16"):
        spec, nonces = enforced_spec(case), nonces_of(case)
        at_once: list[Any] = compute_all(vllm_engine, spec, nonces)
        in_steps: list[Any] = compute_all(vllm_engine, stepwise(spec), nonces)
        assert max(value[1] for value in [*at_once, *in_steps]) <= BFLOAT16_MARGIN
        assert [one[1] for one in at_once] == pytest.approx([one[1] for one in in_steps], abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("vllm_engine", DECODE[:2], indirect=True, ids=str, scope="session")
def test_greedy_answers_beside_chains_are_those_without(vllm_engine: Engine) -> None:
    """And the chains those without chat."""
    case = golden(vllm_engine.info.name, "decode")[0]

    def prove() -> int:
        assert_chains(
            compute_all(vllm_engine, spec_of(case), nonces_of(case), SlicePlan(0.0, 1)), case
        )
        return len(nonces_of(case))

    alone, beside, n_nonces = answers_alone_and_beside(vllm_engine, prove)
    assert n_nonces > 0
    assert [answer.tokens for answer in beside] == [answer.tokens for answer in alone]
