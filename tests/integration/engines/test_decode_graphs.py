"""Steps of decode proofs that are recorded once and replayed give the chains of steps run operation
by operation.

On a GPU these are CUDA graphs; a CPU records the work itself and runs it again, with the same
tensors kept.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from bench.families.checks import greedy
from cli.machine.gpus import visible_gpus
from poc_core.records import ProofSpec
from tests.harness import one_gpu
from tests.harness.chains import assert_chains, enforced_spec, golden, nonces_of, spec_of
from tests.harness.marks import needs_vllm
from tests.stacks.deployments import CHAINS, DECODE, DECODE_BFLOAT16, Deployment
from workers.engines.base import MicroBatch, Slice, Tick
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("engines"), needs_vllm]

alone = pytest.mark.parametrize(
    "vllm_engine", [CHAINS, DECODE[1]], indirect=True, ids=str, scope="session"
)
several = pytest.mark.parametrize(
    "vllm_engine", DECODE[2:], indirect=True, ids=str, scope="session"
)
bfloat16 = pytest.mark.parametrize(
    "vllm_engine", DECODE_BFLOAT16, indirect=True, ids=str, scope="session"
)


@pytest.fixture
def recorded(vllm_engine: Any) -> Iterator[Any]:
    """Asks how many graphs were made since."""
    before = vllm_engine.use_graphs(True)["recorded"]

    def ask() -> int:
        found: dict[str, Any] = vllm_engine.use_graphs(True)
        assert found["why_not"] == ""
        return int(found["recorded"] - before)

    yield ask
    vllm_engine.use_graphs(False)


def spec(block_hash: str, **options: Any) -> ProofSpec:
    return ProofSpec(
        scheme="decode",
        block_hash=block_hash,
        public_key="k",
        seq_len=60,
        options={"max_tokens": 9} | options,
    )


def eager(engine: Any, *proofs: tuple[ProofSpec, range]) -> list[Any]:
    engine.use_graphs(False)
    found = [compute_all(engine, *proof) for proof in proofs]
    engine.use_graphs(True)
    return found


@alone
class TestReplayedSteps:
    def test_they_are_the_references(self, vllm_engine: Any, recorded: Any) -> None:
        for case in golden(vllm_engine.info.name, "decode")[:2]:
            assert_chains(compute_all(vllm_engine, spec_of(case), nonces_of(case)), case)
        assert recorded() >= 1

    def test_blocks_and_batches_that_take_turns_do_not_mix(
        self, vllm_engine: Any, recorded: Any
    ) -> None:
        proofs = [(spec(block_hash), range(n)) for block_hash in "ab" for n in (5, 3)]
        expected = eager(vllm_engine, *proofs)
        for _ in range(2):
            assert [compute_all(vllm_engine, *proof) for proof in proofs] == expected
        assert recorded() == 2

    def test_chat_and_other_proofs_between_two_steps_change_nothing(
        self, vllm_engine: Any, recorded: Any
    ) -> None:
        expected, answers = eager(vllm_engine, (spec("c"), range(4)))[0], greedy(vllm_engine)
        other, own = ProofSpec(block_hash="o", public_key="k", seq_len=64), 4_000_000
        values: dict[int, Any] = {}
        for step in range(10):
            begin = [MicroBatch(spec("c"), range(4), id=own)] if step == 0 else []
            one = Slice(own, 0, vllm_engine.info.n_layers, step, step + 1)
            values |= vllm_engine.tick(Tick(begin, [one], wait=True)).values
            if step % 3 == 2:
                assert greedy(vllm_engine) == answers, f"after step {step}"
                compute_all(vllm_engine, other, range(5))
        assert values[own] == expected
        assert recorded() >= 1

    def test_steps_that_chat_cuts_between_layers_run_as_ever(
        self, vllm_engine: Any, recorded: Any
    ) -> None:
        proof = (spec("e"), range(6))
        assert compute_all(vllm_engine, *proof, SlicePlan(0.0, 1)) == eager(vllm_engine, proof)[0]
        assert recorded() == 0

    def test_reflections_of_each_nonces_own_are_not_recorded(
        self, vllm_engine: Any, recorded: Any
    ) -> None:
        proof = (spec("f", per_nonce_reflection=True), range(7))
        assert compute_all(vllm_engine, *proof) == eager(vllm_engine, proof)[0]
        assert recorded() == 0


@pytest.mark.slow
@several
def test_ranks_and_stages_record_their_parts_of_a_step(vllm_engine: Any, recorded: Any) -> None:
    for case in golden(vllm_engine.info.name, "decode")[:2]:
        assert_chains(compute_all(vllm_engine, spec_of(case), nonces_of(case)), case)
    assert recorded() >= 1
    proofs = [(spec("h"), range(n)) for n in (5, 3)]
    expected = eager(vllm_engine, *proofs)
    assert [compute_all(vllm_engine, *proof) for proof in proofs * 2] == expected * 2


@pytest.mark.slow
@bfloat16
@pytest.mark.parametrize("n", [1, 33, 128])
def test_bfloat16_chains_and_margins_are_the_same_bits(
    vllm_engine: Any, recorded: Any, n: int
) -> None:
    case = golden(vllm_engine.info.name, "decode")[0]
    claims = spec_of(
        case,
        stepwise=True,
        enforced={str(nonce): [nonce % 16] * (case["max_tokens"] + 1) for nonce in range(n)},
    )
    proofs = [(spec_of(case), range(n)), (claims, range(n))]
    assert [compute_all(vllm_engine, *proof) for proof in proofs] == eager(vllm_engine, *proofs)
    assert recorded() == 1


@pytest.mark.gpu
@bfloat16
@pytest.mark.parametrize("n", [1, 16, 200, 512])
def test_cuda_graphs_give_the_bits_of_single_kernels(
    vllm_engine: Any, recorded: Any, n: int
) -> None:
    """200 nonces of 64 positions and 40 steps, twice, and each margin of claims that are wrong."""
    chains = ProofSpec(
        scheme="decode", block_hash="g", public_key="k", seq_len=64, options={"max_tokens": 40}
    )
    wrong = {str(nonce): [(nonce + step) % 16 for step in range(41)] for nonce in range(n)}
    claims = chains.model_copy(
        update={"options": {"max_tokens": 40, "stepwise": True, "enforced": wrong}}
    )
    proofs = [(chains, range(n)), (claims, range(n))]
    expected = eager(vllm_engine, *proofs)
    for _ in range(2):
        assert [compute_all(vllm_engine, *proof) for proof in proofs] == expected
    assert recorded() >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["tensor_parallel", "pipeline_parallel"])
def test_graphs_of_two_gpus_give_the_bits_of_single_kernels_beside_chat(way: str) -> None:
    """Sums over ranks are part of a graph; what stages exchange is not. On a host with one GPU both
    ranks share it, and take turns.
    """
    two = Deployment("tiny-qwen3-moe-256", "bfloat16", **{way: 2})
    with ExitStack() as exits:
        shared = len(visible_gpus()) < 2
        if shared:
            exits.enter_context(one_gpu.as_two())
        engine: Any = two.start(*(one_gpu.ARGUMENTS if shared else ()))
        exits.callback(engine.close)
        assert engine.use_graphs(True)["recorded"] > 0, "by the start's own test"
        answers, proofs = greedy(engine), [(spec("two"), range(n)) for n in (1, 16, 200)]
        expected = eager(engine, *proofs)
        for _ in range(2):
            assert [compute_all(engine, *proof) for proof in proofs] == expected
            assert greedy(engine) == answers
        assert engine.use_graphs(True)["why_not"] == ""


@pytest.mark.gpu
@bfloat16
def test_replayed_chains_hold_against_one_forward(vllm_engine: Any, recorded: Any) -> None:
    for case in golden(vllm_engine.info.name, "decode"):
        found = compute_all(vllm_engine, spec_of(case), nonces_of(case))
        enforced = dict(zip(map(str, nonces_of(case)), found, strict=True))
        assert (
            max(
                one[1]
                for one in compute_all(
                    vllm_engine, spec_of(case, enforced=enforced), nonces_of(case)
                )
            )
            <= 0.025
        )
        assert (
            max(one[1] for one in compute_all(vllm_engine, enforced_spec(case), nonces_of(case)))
            <= 0.025
        )
    assert recorded() >= 1
