"""The verdict on distances (protocol.md, section 3, Fraud) with real ones: liars are found out,
honest nodes never.

The distances are computed once; each of the 200 repetitions draws its batch of 400 valid nonces
from them.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from poc_core.records import ProofSpec
from poc_core.schemes.distance.contract import judge_distances
from tests.harness import golden
from tests.harness.marks import needs_vllm
from tests.stacks.deployments import QWEN3
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.pipeline import compute_all

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("engines")]

SPEC = ProofSpec(
    scheme="distance",
    block_hash="block",
    public_key="key",
    seq_len=8,
    options={"randomization": "sign_flips"},
)
N_NONCES = 3000  # so that even at the smaller r_target more than N_CLAIMED are valid
N_CLAIMED = 400
REPETITIONS = 200
R_TARGETS = [1.408, 1.416]  # 17 and 61 % of this block's nonces are valid
# Every repetition with an r_target of its own, so that other nonces are the ones that lie close to
# it.
MANY_R_TARGETS = np.linspace(1.408, 1.42, REPETITIONS)
# protocol.md gives 0.0004 as the largest difference between number formats, of fewer nonces than
# these.
MARGIN = 0.001

Distances = np.ndarray  # float64 (N_NONCES,), of the nonces 0, 1, 2, ...


def start(dtype: str = "float32", **options: Any) -> Engine:
    return load_engine(
        EngineOptions(
            model=golden.model_dir("tiny-qwen3"), engine="transformers", dtype=dtype, **options
        )
    )


def distances(engine: Engine, spec: ProofSpec = SPEC) -> Distances:
    return np.array(compute_all(engine, spec, range(N_NONCES)), np.float64)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = start()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def own(engine: Engine) -> Distances:
    """What the validator computes."""
    return distances(engine)


@pytest.fixture(
    scope="module",
    params=[{"block_hash": "another"}, {"public_key": "another"}, {"seq_len": 7}],
    ids=str,
)
def of_another_proof(engine: Engine, request: pytest.FixtureRequest) -> Distances:
    return distances(engine, SPEC.model_copy(update=request.param))


def n_found_out(
    claimed: Distances, own: Distances, r_targets: Iterable[float], n_invented: int = 0
) -> int:
    """For how many of the r_targets a node that claims distances below it is called a fraud.

    `n_invented` nonces of each batch were not computed: any nonce will do, with a distance that
    looks valid.
    """
    random = np.random.default_rng(1)
    n_frauds = 0
    for r_target in r_targets:
        valid = np.flatnonzero(claimed < r_target)
        assert len(valid) >= N_CLAIMED
        nonces = random.choice(valid, N_CLAIMED - n_invented, replace=False)
        invented = random.choice(
            np.setdiff1d(np.arange(N_NONCES), nonces), n_invented, replace=False
        )
        received = [*claimed[nonces], *random.choice(claimed[valid], n_invented)]
        computed = [*own[nonces], *own[invented]]
        n_frauds += judge_distances(received, computed, float(r_target)).fraud_detected
    return n_frauds


def test_an_honest_node_that_starts_anew_with_smaller_micro_batches_is_never_a_fraud(
    own: Distances,
) -> None:
    claimed = distances(start(max_batch_tokens=50 * SPEC.seq_len))
    assert n_found_out(claimed, own, MANY_R_TARGETS) == 0


@needs_vllm
@pytest.mark.parametrize("vllm_engine", [QWEN3], indirect=True, ids=str, scope="session")
def test_an_honest_node_with_the_same_number_format_is_never_a_fraud(
    own: Distances, vllm_engine: Engine
) -> None:
    assert n_found_out(distances(vllm_engine), own, MANY_R_TARGETS) == 0


def test_an_honest_node_with_another_number_format_is_never_a_fraud_if_it_keeps_clear_of_r_target(
    own: Distances,
) -> None:
    claimed = distances(start(dtype="bfloat16"))
    assert np.abs(claimed - own).max() < MARGIN
    for r_target in MANY_R_TARGETS:
        nonces = np.flatnonzero(claimed < r_target - MARGIN)
        assert (
            judge_distances(
                claimed[nonces].tolist(), own[nonces].tolist(), float(r_target)
            ).n_invalid
            == 0
        )


@pytest.mark.parametrize("r_target", R_TARGETS)
def test_distances_of_another_proof_are_found_out(
    own: Distances, of_another_proof: Distances, r_target: Any
) -> None:
    assert n_found_out(of_another_proof, own, [r_target] * REPETITIONS) == REPETITIONS


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_invented_distances_are_found_out(own: Distances, share: float) -> None:
    assert (
        n_found_out(own, own, [R_TARGETS[0]] * REPETITIONS, n_invented=round(share * N_CLAIMED))
        == REPETITIONS
    )


def test_where_most_nonces_are_valid_few_invented_ones_are_seldom_missed(own: Distances) -> None:
    """Of 20 invented nonces 12 are valid by luck, and three of 400 must be invalid for a
    verdict.
    """
    assert (
        n_found_out(own, own, [R_TARGETS[1]] * REPETITIONS, n_invented=N_CLAIMED // 20)
        >= 0.95 * REPETITIONS
    )


@pytest.mark.parametrize("seq_len", [1, 7, 9, 32])
def test_another_seq_len_gives_other_distances(
    engine: Engine, own: Distances, seq_len: int
) -> None:
    others = np.array(compute_all(engine, SPEC.model_copy(update={"seq_len": seq_len}), range(100)))
    assert (others != own[:100]).all()
    assert np.median(np.abs(others - own[:100])) > 0.003  # their standard deviation is 0.008
