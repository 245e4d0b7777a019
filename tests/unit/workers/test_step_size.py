"""How large the next micro-batch is: as large as its time allows, no larger than the engine holds."""

import itertools
import random
from typing import Any

import pytest

from poc_core.records import ModelInfo
from tests.samples import DISTANCE_SPEC, SPEC
from workers.step_size import StepSize

LIMIT_MS = 100.0
INFO = ModelInfo("tiny-qwen3", 128, 4, 2048, 8192, "float32")
HOLDS = INFO.max_batch(SPEC.seq_len)  # 128


def settle(sizes: StepSize, nonce_s: float, spec: Any = SPEC, overhead_s: float = 0.0, steps: int = 40) -> list[int]:
    """The sizes of `steps` micro-batches on an engine that takes `nonce_s` per nonce."""
    taken = []
    for _ in range(steps):
        n = sizes.next(spec)
        sizes.ran(spec, n, overhead_s + n * nonce_s)
        taken.append(n)
    return taken


def test_begins_with_one_nonce_and_at_most_doubles() -> None:
    taken = settle(StepSize(INFO, LIMIT_MS), 0.0001)
    assert taken[0] == 1
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(taken))


def test_grows_to_what_fits_into_the_limit() -> None:
    taken = settle(StepSize(INFO, LIMIT_MS), 0.005)
    assert 0.6 * LIMIT_MS <= taken[-1] * 5 <= LIMIT_MS


def test_grows_to_what_the_engine_holds() -> None:
    assert settle(StepSize(INFO, LIMIT_MS), 0.00001)[-1] == HOLDS


@pytest.mark.parametrize("nonce_s", [0.0003, 0.001, 0.007, 0.03, 0.06, 0.09])
@pytest.mark.parametrize("overhead_s", [0.0, 0.01])
def test_never_aims_beyond_the_limit(nonce_s: float, overhead_s: float) -> None:
    taken = settle(StepSize(INFO, LIMIT_MS), nonce_s, overhead_s=overhead_s)
    assert max(overhead_s + n * nonce_s for n in taken) <= LIMIT_MS / 1000


def test_one_nonce_that_takes_longer_than_the_limit_is_computed_all_the_same() -> None:
    assert settle(StepSize(INFO, LIMIT_MS), 0.5) == [1] * 40


def test_shrinks_within_a_few_steps_when_the_engine_slows_down() -> None:
    sizes = StepSize(INFO, LIMIT_MS)
    settle(sizes, 0.001)
    taken = settle(sizes, 0.004, steps=10)
    assert taken[-1] * 4 <= LIMIT_MS
    assert taken[2] < taken[0]


def test_grows_again_when_the_engine_is_faster() -> None:
    sizes = StepSize(INFO, LIMIT_MS)
    slow = settle(sizes, 0.008)[-1]
    assert settle(sizes, 0.002)[-1] > 3 * slow


def test_a_slow_first_batch_does_not_count_for_long() -> None:
    sizes = StepSize(INFO, LIMIT_MS)
    sizes.ran(SPEC, 1, 30.0)  # compiled kernels
    assert settle(sizes, 0.002, steps=15)[-1] >= 30


def test_times_that_scatter_seldom_exceed_the_limit() -> None:
    random.seed(5)
    sizes = StepSize(INFO, LIMIT_MS)
    times = []
    for _ in range(2000):
        n = sizes.next(SPEC)
        times.append(n * 0.004 * random.choice([1, 1, 1, 1.2, 1.5]))
        sizes.ran(SPEC, n, times[-1])
    assert sum(seconds > LIMIT_MS / 1000 for seconds in times) < 0.04 * len(times)  # of their mean alone: 13 %


def test_every_kind_has_its_own_times() -> None:
    sizes = StepSize(INFO, LIMIT_MS)
    longer = SPEC.model_copy(update={"seq_len": 512})
    short = settle(sizes, 0.001)[-1]
    long = settle(sizes, 0.01, longer)[-1]
    distance = settle(sizes, 0.02, DISTANCE_SPEC)[-1]
    assert (sizes.next(SPEC), sizes.next(longer), sizes.next(DISTANCE_SPEC)) == (short, long, distance)
    assert short > long > distance


def test_other_blocks_are_the_same_kind() -> None:
    sizes = StepSize(INFO, LIMIT_MS)
    settle(sizes, 0.001)
    assert sizes.next(SPEC.model_copy(update={"block_hash": "another"})) == sizes.next(SPEC) > 1


def test_kinds_are_forgotten_one_by_one_those_used_last_stay() -> None:
    sizes = StepSize(INFO, LIMIT_MS)
    settle(sizes, 0.001)
    for seq_len in range(1, 100):
        sizes.ran(SPEC.model_copy(update={"seq_len": 64 + seq_len}), 1, 0.001)
        sizes.ran(SPEC, 8, 0.008)
    assert sizes.next(SPEC) > 1
    assert sizes.next(SPEC.model_copy(update={"seq_len": 65})) == 1
