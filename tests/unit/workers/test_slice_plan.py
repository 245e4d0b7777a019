"""How large micro-batches and slices become, from times that a test makes up."""

from collections.abc import Callable

import pytest

from poc_core.records import ProofSpec
from tests.harness.samples import DISTANCE_SPEC, SPEC
from workers.slice_plan import SlicePlan

LAYERS = range(3, 31)  # the 28 layers of a later pipeline stage


def lengths(slices: list[range]) -> list[int]:
    return [len(one) for one in slices]


def measured(n: int, layer_s: float, limit_ms: float | None = 50, in_flight: int = 1) -> SlicePlan:
    plan = SlicePlan(limit_ms, in_flight)
    plan.ran(SPEC, n, 1, layer_s)
    return plan


# Slices.


@pytest.mark.parametrize("stage", [range(1), range(7), LAYERS, range(94)], ids=str)
@pytest.mark.parametrize("layer_ms", [0.5, 3, 8, 17, 49, 51, 400])
def test_slices_cover_every_layer_once_about_equally_long_and_none_beyond_the_limit(
    stage: range, layer_ms: float
) -> None:
    slices = measured(32, layer_ms / 1000).cut(SPEC, 32, stage)
    assert [layer for one in slices for layer in one] == list(stage)
    assert max(lengths(slices)) - min(lengths(slices)) <= 1
    assert max(lengths(slices)) * layer_ms <= 50 or lengths(slices) == [1] * len(stage)


def test_slices_are_as_long_as_the_limit_allows() -> None:
    assert lengths(measured(32, 0.012).cut(SPEC, 32, LAYERS)) == [4] * 7  # 4 x 12 ms, of 50
    assert lengths(measured(32, 0.001).cut(SPEC, 32, LAYERS)) == [28]


def test_the_limit_is_what_chat_waits_for_all_slices_on_the_device() -> None:
    assert lengths(measured(32, 0.012, in_flight=2).cut(SPEC, 32, LAYERS)) == [2] * 14


def test_before_the_first_measurement_layers_go_one_by_one() -> None:
    assert lengths(SlicePlan(50, 1).cut(SPEC, 32, LAYERS)) == [1] * 28


def test_without_chat_nothing_is_cut() -> None:
    assert SlicePlan(None, 1).cut(SPEC, 32, LAYERS) == [LAYERS]
    assert measured(32, 7.0, limit_ms=None).cut(SPEC, 32, LAYERS) == [LAYERS]


# No call may last as long as an engine is waited for.


def limited(token_layer_s: float, limit_ms: float | None = None) -> SlicePlan:
    """Of an engine whose calls last 10 s at most; SPEC has nonces of 64 tokens."""
    return SlicePlan(limit_ms, 1, longest_call_s=10.0, token_layer_s=token_layer_s)


def test_a_first_micro_batch_is_cut_and_shrinks_by_the_self_tests_times() -> None:
    quick, slow, slower = limited(1e-6), limited(1e-3), limited(0.02)
    assert quick.cut(SPEC, 128, LAYERS) == [LAYERS]
    assert lengths(slow.cut(SPEC, 128, LAYERS)) == [1] * 28  # 8 s each
    assert [plan.batch_size(SPEC, 128) for plan in (quick, slow, slower)] == [128, 128, 7]
    assert limited(1.0).batch_size(SPEC, 128) == 1
    # Chat's limit is too fine for them: layers go one by one, in as large a micro-batch.
    beside_chat = limited(1e-3, 50)
    assert beside_chat.batch_size(SPEC, 128) == 128
    assert lengths(beside_chat.cut(SPEC, 128, LAYERS)) == [1] * 28


def test_what_was_measured_counts_more_than_the_self_test() -> None:
    plan = limited(0.02)
    plan.ran(SPEC, 7, 1, 0.07)
    assert plan.batch_size(SPEC, 128) == 128
    assert lengths(plan.cut(SPEC, 128, LAYERS)) == [7] * 4  # 1.28 s a layer, of 10
    plan.ran(SPEC, 128, 1, 30.0)
    assert plan.batch_size(SPEC, 128) == 40


def test_steps_are_of_one_token_each() -> None:
    plan = limited(1e-3)
    assert plan.batch_size(CHAIN, 128, steps=True) == 128
    assert plan.cut_steps(CHAIN, 128, LAYERS) == ([LAYERS], 2)  # 3.6 s each, of 10


def test_a_smaller_micro_batch_than_the_one_measured_gets_longer_slices() -> None:
    # 6 ms a layer: 8 fit, so 4 slices.
    assert lengths(measured(32, 0.024).cut(SPEC, 8, LAYERS)) == [7] * 4


def test_a_limit_of_nothing_is_a_layer_each() -> None:
    assert lengths(SlicePlan(0.0, 1).cut(SPEC, 32, LAYERS)) == [1] * 28
    assert lengths(measured(32, 0.001, limit_ms=0.0).cut(SPEC, 32, LAYERS)) == [1] * 28


# Micro-batches.


def test_micro_batches_are_as_large_as_memory_allows() -> None:
    assert SlicePlan(50, 1).batch_size(SPEC, 512) == 512
    assert measured(512, 0.049).batch_size(SPEC, 512) == 512
    # The limit, as when memory turned out to be short.
    assert measured(512, 0.049).batch_size(SPEC, 400) == 400


def test_where_one_layer_is_longer_than_the_limit_the_micro_batch_shrinks_to_what_fits() -> None:
    assert measured(32, 0.2).batch_size(SPEC, 32) == 8


def sizes_with(layer_ms: Callable[[int], float], n: int, first: int = 32) -> list[int]:
    """Sizes of the next `n` micro-batches of ten layers each."""
    plan, sizes = SlicePlan(50, 2), [first]
    for _ in range(n):
        for _ in range(10):
            plan.ran(SPEC, sizes[-1], 1, layer_ms(sizes[-1]) / 1000)
        sizes.append(plan.batch_size(SPEC, 32))
    return sizes


def test_a_larger_one_is_tried_as_not_all_costs_grow_with_the_nonces() -> None:
    # DeepSeek-V4-Flash on two H200s: 24 nonces take 21.8 ms, 28 take 24.5 of 25.
    assert sizes_with(lambda n: 5.6 + 0.675 * n, 6) == [32, 28, 28, 28, 28, 28, 28]
    assert sizes_with(lambda n: 5.6 + 0.675 * n, 6, first=20) == [20, 24, 28, 32, 28, 28, 28]


def test_what_was_tried_and_is_too_long_is_not_tried_again_at_once() -> None:
    assert sizes_with(lambda n: 1.0 + 0.98 * n, 6, first=20) == [20, 24, 28, 24, 24, 24, 24]
    assert sizes_with(lambda n: 1.04 * n, 6, first=20) == [20, 24, 24, 24, 24, 24, 24]
    assert sizes_with(lambda n: 1.06 * n, 6, first=20) == [20, 24, 20, 20, 20, 20, 20]


def test_the_smallest_micro_batch_is_one_nonce() -> None:
    assert measured(32, 60.0).batch_size(SPEC, 32) == 1
    assert measured(1, 2.0).batch_size(SPEC, 32) == 1
    assert measured(32, 0.001, limit_ms=0.0).batch_size(SPEC, 32) == 1


def test_it_settles_where_a_layer_is_just_within_the_limit() -> None:
    plan, sizes = SlicePlan(50, 1), [32]
    for _ in range(12):
        plan.ran(SPEC, sizes[-1], 1, 0.010 + 0.004 * sizes[-1])  # 10 nonces fit
        sizes.append(plan.batch_size(SPEC, 32))
    assert sizes[-1] in (9, 10)
    assert all(10 + 4 * size <= 55 for size in sizes[1:])


def test_a_small_micro_batch_grows_by_doubling_where_the_full_one_seems_too_long() -> None:
    # 10 of them would fit, says a measurement of 2.
    assert measured(2, 0.010).batch_size(SPEC, 512) == 4
    assert measured(4, 0.010).batch_size(SPEC, 512) == 8


def test_after_a_small_one_that_says_the_full_one_fits_it_is_full_again() -> None:
    assert measured(2, 0.0001).batch_size(SPEC, 512) == 512


def test_without_chat_a_small_job_makes_the_next_one_no_smaller() -> None:
    assert measured(1, 3.0, limit_ms=None).batch_size(SPEC, 512) == 512


def test_shrunk_micro_batches_have_few_sizes_each_near_what_fits() -> None:
    # An engine's memory grows with each size that it meets.
    sizes = {
        fits: measured(128, 0.05 * 128 / (fits + 0.5)).batch_size(SPEC, 128)
        for fits in range(1, 128)
    }
    assert len(set(sizes.values())) == 3 + 4 * 5  # 1 to 3, and four of each doubling up to 127
    assert all(fits * 4 / 5 <= size <= fits for fits, size in sizes.items())
    assert measured(128, 0.05).batch_size(SPEC, 127) == 127  # what memory allows, whole


def test_each_scheme_and_length_has_its_own_times() -> None:
    plan = measured(32, 0.2)
    longer = SPEC.model_copy(update={"seq_len": 1024})
    assert [plan.batch_size(spec, 32) for spec in (SPEC, DISTANCE_SPEC, longer)] == [8, 32, 32]
    assert plan.batch_size(SPEC.model_copy(update={"block_hash": "other"}), 32) == 8


# Measurements.


def test_a_slice_counts_by_its_layers() -> None:
    plan = SlicePlan(50, 1)
    plan.ran(SPEC, 32, 4, 0.048)
    assert lengths(plan.cut(SPEC, 32, LAYERS)) == [4] * 7


def test_one_late_slice_changes_little_and_many_change_it() -> None:
    plan = measured(32, 0.010)
    plan.ran(SPEC, 32, 1, 0.020)
    # A layer takes 13 ms.
    assert plan.cut(SPEC, 32, range(12)) == [range(3), range(3, 6), range(6, 9), range(9, 12)]
    for _ in range(20):
        plan.ran(SPEC, 32, 1, 0.020)
    assert lengths(plan.cut(SPEC, 32, range(12))) == [2] * 6


def test_the_first_slices_that_compile_kernels_are_forgotten_at_once() -> None:
    plan = measured(32, 20.0)
    plan.ran(SPEC, 32, 1, 0.012)
    assert lengths(plan.cut(SPEC, 32, LAYERS)) == [4] * 7
    assert plan.batch_size(SPEC, 32) == 32


def test_many_kinds_of_micro_batches_are_no_burden() -> None:
    plan = SlicePlan(50, 1)
    for seq_len in range(1, 200):
        plan.ran(SPEC.model_copy(update={"seq_len": seq_len}), 32, 1, 0.2)
    assert plan.batch_size(SPEC.model_copy(update={"seq_len": 1}), 32) == 32  # forgotten
    assert plan.batch_size(SPEC.model_copy(update={"seq_len": 199}), 32) == 8


# Steps.

CHAIN = ProofSpec(
    scheme="decode", block_hash="b", public_key="k", seq_len=64, options={"max_tokens": 64}
)


@pytest.mark.parametrize(
    ("step_ms", "n_slices", "n_steps"),
    [(1, 1, 16), (10, 1, 5), (30, 1, 1), (60, 2, 1), (9e9, 28, 1)],
)
def test_a_slice_holds_as_many_steps_as_the_limit_allows_or_part_of_one(
    step_ms: float, n_slices: int, n_steps: int
) -> None:
    plan = SlicePlan(50, 1)
    plan.ran(CHAIN, 32, len(LAYERS), step_ms / 1000, steps=True)
    slices, steps = plan.cut_steps(CHAIN, 32, LAYERS)
    assert (len(slices), steps) == (n_slices, n_steps)
    assert [layer for one in slices for layer in one] == list(LAYERS)


def test_a_step_is_whole_until_one_was_measured_whatever_the_prefill_took() -> None:
    plan = SlicePlan(50, 1)
    plan.ran(CHAIN, 32, 1, 0.04)
    assert plan.cut_steps(CHAIN, 32, LAYERS) == ([LAYERS], 1)
    assert len(plan.cut(CHAIN, 32, LAYERS)) == 28
    assert SlicePlan(None, 1).cut_steps(CHAIN, 32, LAYERS) == ([LAYERS], 16)


def test_steps_of_few_nonces_count_as_long_as_those_of_many() -> None:
    """Each reads all weights, so that 16 of them would take 480 ms."""
    plan = SlicePlan(50, 1)
    plan.ran(CHAIN, 32, len(LAYERS), 0.030, steps=True)
    assert plan.cut_steps(CHAIN, 1, LAYERS) == ([LAYERS], 1)
    assert len(plan.cut_steps(CHAIN, 64, LAYERS)[0]) == 2


def test_a_small_job_of_chains_makes_the_rounds_next_micro_batch_no_smaller() -> None:
    plan = SlicePlan(50, 2)
    plan.ran(CHAIN, 512, len(LAYERS), 0.020, steps=True)
    plan.ran(CHAIN, 1, len(LAYERS), 0.015, steps=True)
    assert plan.batch_size(CHAIN, 512, steps=True) == 512
    assert plan.cut_steps(CHAIN, 512, LAYERS) == ([LAYERS], 1)


def test_chains_that_were_too_many_shrink_by_what_fewer_take() -> None:
    plan = SlicePlan(50, 1)
    plan.ran(CHAIN, 64, 1, 0.100, steps=True)
    assert plan.batch_size(CHAIN, 64, steps=True) == 32
    plan.ran(CHAIN, 32, 1, 0.075, steps=True)
    assert plan.batch_size(CHAIN, 64, steps=True) == 20
