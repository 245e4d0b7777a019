"""Micro-batches that are cancelled, refused, too large for memory, or fail."""

from collections.abc import Sequence

import pytest

from poc_core.errors import ProoflineError, SpecError
from poc_core.records import ProofSpec
from tests.harness.pipeline import Ends, fly, out_of_memory, pipeline_of
from tests.harness.samples import OTHER_SPEC, SPEC
from tests.peers.fake_engine import FakeEngine, break_down, values
from workers.engines.base import EngineMemoryError

LONG = SPEC.model_copy(update={"seq_len": 1024})


# What is larger than the engine holds.


def test_a_micro_batch_beyond_the_budget_runs_in_parts(ends: Ends) -> None:
    engine = FakeEngine(n_stages=2)
    ends.fly(engine, range(20), [99], spec=LONG)
    assert engine.begun == [list(range(8)), list(range(8, 16)), [16, 17, 18, 19], [99]]
    assert ends.values == {0: values(LONG, range(20)), 1: values(LONG, [99])}


# Cancelling.


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("n_ticks", range(8))
def test_a_cancelled_micro_batch_is_dropped_wherever_it_is(
    ends: Ends, n_stages: int, n_ticks: int
) -> None:
    engine = FakeEngine(n_stages, late=True)
    pipeline = pipeline_of(engine)
    going = [ends.of(number, [number]) for number in range(3)]
    for micro_batch in going:
        pipeline.add(micro_batch)
    for _ in range(n_ticks):
        pipeline.run(wait=False)
    had_ended = 1 in ends.order
    n_before = len([one for one in engine.slices if one.micro_batch == 1])
    pipeline.cancel(going[1])
    fly(pipeline)
    assert ends.order == ([0, 1, 2] if had_ended else [0, 2])
    assert (
        len([one for one in engine.slices if one.micro_batch == 1 and going[1].id == 1]) == n_before
    )
    assert engine.is_idle


@pytest.mark.parametrize(
    ("batches", "spec", "short_at", "n_ticks"),
    [
        ([[0], [1]], SPEC, None, 1),
        ([range(20)], LONG, None, 6),  # the first part is done, the second has begun
        ([range(128)], SPEC, 2, 5),  # in parts since memory was short
    ],
)
def test_what_is_cancelled_stays_silent_whole_or_in_parts(
    ends: Ends, batches: list[Sequence[int]], spec: ProofSpec, short_at: int | None, n_ticks: int
) -> None:
    engine = FakeEngine()
    if short_at is not None:
        engine.events[short_at] = out_of_memory
    pipeline = pipeline_of(engine)
    going = [ends.of(number, nonces, spec) for number, nonces in enumerate(batches)]
    for micro_batch in going:
        pipeline.add(micro_batch)
    for _ in range(n_ticks):
        pipeline.run(wait=False)
    for micro_batch in going:
        pipeline.cancel(micro_batch)
    fly(pipeline)
    assert (ends.order, len(engine.ticks), engine.is_idle) == ([], n_ticks, True)


def test_cancelling_what_ended_or_was_cancelled_does_nothing(ends: Ends) -> None:
    engine = FakeEngine()
    pipeline = pipeline_of(engine)
    micro_batch = ends.of(0, [0])
    pipeline.add(micro_batch)
    fly(pipeline)
    pipeline.cancel(micro_batch)
    assert pipeline.is_empty


# Memory.


@pytest.mark.parametrize(
    ("fits", "n_stages"), [(64, 3), (65, 2), (300, 1), (300, 3), (1000, 2), (4095, 1), (4095, 3)]
)
def test_where_memory_is_short_the_budget_is_halved_until_it_fits_and_no_value_is_lost(
    ends: Ends, n_stages: int, fits: int
) -> None:
    engine = FakeEngine(n_stages)
    engine.memory, engine.memory_error = fits, out_of_memory
    pipeline = pipeline_of(engine)
    batches = [range(128), range(200, 328), range(400, 407)]
    for number, nonces in enumerate(batches):
        pipeline.add(ends.of(number, nonces))
    fly(pipeline)
    assert ends.values == {number: values(SPEC, nonces) for number, nonces in enumerate(batches)}
    assert fits / 2 < engine.info.max_batch(64) * 64 <= fits
    assert engine.is_idle


def test_memory_that_is_short_once_halves_the_budget_once(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.events[2] = out_of_memory
    ends.fly(engine, range(128), range(500, 628))
    assert engine.info.max_batch_tokens == 4096
    assert [len(nonces) for nonces in engine.begun] == [128, 64, 64, 64, 64]
    assert ends.values == {0: values(SPEC, range(128)), 1: values(SPEC, range(500, 628))}
    (line,) = [entry.message for entry in caplog.records if "too little memory" in entry.message]
    assert "8192 tokens" in line
    assert "4096" in line


def test_a_micro_batch_smaller_than_the_budget_halves_what_it_held(ends: Ends) -> None:
    engine = FakeEngine()
    engine.events[0] = out_of_memory
    ends.fly(engine, range(10))
    assert engine.info.max_batch_tokens == 320
    assert ends.values == {0: values(SPEC, range(10))}


def test_a_single_nonce_without_memory_ends_with_the_error_and_leaves_the_budget(
    ends: Ends,
) -> None:
    engine = FakeEngine(n_stages=2)
    engine.events[5] = out_of_memory
    pipeline = pipeline_of(engine)
    pipeline.add(ends.of(0, [0], LONG))
    pipeline.add(ends.of(1, [1]))  # in the first stage then
    pipeline.add(ends.of(2, [2]))
    fly(pipeline)
    assert isinstance(ends.errors[0], EngineMemoryError)
    assert ends.values == {1: values(SPEC, [1]), 2: values(SPEC, [2])}
    assert engine.info.max_batch_tokens == 8192


def test_after_memory_was_short_all_processes_are_told_to_forget(ends: Ends) -> None:
    engine = FakeEngine(n_stages=2)
    engine.events[5] = out_of_memory
    ends.fly(engine, range(4), range(4))
    assert list(engine.ticks[6].drop) == [0, 1]
    # A new micro-batch, whose values cannot be taken for old ones.
    assert [one.id for one in engine.ticks[6].begin] == [2]


def test_a_micro_batch_in_parts_that_fails_ends_once(ends: Ends) -> None:
    engine = FakeEngine()
    engine.events = {2: out_of_memory, 5: break_down}
    pipeline = pipeline_of(engine)
    pipeline.add(ends.of(0, range(128)))
    pipeline.add(ends.of(1, [1]))
    with pytest.raises(ProoflineError, match="CUDA error"):
        fly(pipeline)
    assert ends.order == [0, 1]


# Refusals and failures.


@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_refused_spec_ends_its_micro_batch_alone(ends: Ends, n_stages: int) -> None:
    engine = FakeEngine(n_stages)
    engine.refuse["other"] = "k_dim must be at most 128."
    pipeline = pipeline_of(engine)
    for number, spec in enumerate([SPEC, OTHER_SPEC, SPEC]):
        pipeline.add(ends.of(number, [number], spec))
    fly(pipeline)
    assert isinstance(ends.errors[1], SpecError)
    assert str(ends.errors[1]) == "k_dim must be at most 128."
    assert ends.values == {0: values(SPEC, [0]), 2: values(SPEC, [2])}


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_an_error_ends_all_and_passes_through(ends: Ends, n_stages: int) -> None:
    engine = FakeEngine(n_stages)
    engine.events[6] = break_down
    pipeline = pipeline_of(engine)
    for number in range(4):
        pipeline.add(ends.of(number, [number]))
    with pytest.raises(ProoflineError, match="CUDA error") as raised:
        fly(pipeline)
    assert sorted(ends.order) == [0, 1, 2, 3]
    assert set(ends.errors.values()) == {raised.value}
    pipeline.add(ends.of(9, [9]))  # and what comes then is as ever
    fly(pipeline)
    assert ends.values.get(9) == values(SPEC, [9])
    assert engine.is_idle


def test_failing_ends_what_waits_and_what_flies(ends: Ends) -> None:
    engine = FakeEngine()
    pipeline = pipeline_of(engine)
    for number in range(3):
        pipeline.add(ends.of(number, [number]))
    pipeline.run(wait=False)
    error = ProoflineError("the worker failed")
    pipeline.fail(error)
    assert ends.errors == dict.fromkeys(range(3), error)
    fly(pipeline)
    assert (len(engine.ticks), engine.is_idle) == (1, True)
