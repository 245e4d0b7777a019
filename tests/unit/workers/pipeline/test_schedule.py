"""Each tick runs one slice of one micro-batch."""

import pytest

from tests.harness.pipeline import Ends, fly, pipeline_of
from tests.harness.samples import OTHER_SPEC, SPEC
from tests.peers.fake_engine import FakeEngine, values
from workers.engines.base import Slice


@pytest.mark.parametrize("late", [False, True], ids=["values at once", "values late"])
@pytest.mark.parametrize("limit_ms", [0.0, None], ids=["layers", "whole stages"])
@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_every_micro_batch_gets_its_own_values_in_order(
    ends: Ends, n_stages: int, limit_ms: float | None, late: bool
) -> None:
    engine = FakeEngine(n_stages, late=late)
    pipeline = pipeline_of(engine, limit_ms)
    batches = [range(number, number + 3) for number in range(0, 70, 10)]
    for number, nonces in enumerate(batches):
        pipeline.add(ends.of(number, nonces, OTHER_SPEC if number % 2 else SPEC))
    fly(pipeline)
    assert ends.order == list(range(7))
    assert ends.values == {
        n: values(OTHER_SPEC if n % 2 else SPEC, nonces) for n, nonces in enumerate(batches)
    }
    assert engine.begun == [list(nonces) for nonces in batches]
    assert engine.is_idle


@pytest.mark.parametrize("limit_ms", [0.0, None], ids=["layers", "whole stages"])
@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_every_stage_is_busy_in_every_tick_once_the_pipeline_is_filled(
    ends: Ends, n_stages: int, limit_ms: float | None
) -> None:
    engine = FakeEngine(n_stages)
    pipeline = pipeline_of(engine, limit_ms)
    n_going = 6
    for number in range(n_going):
        pipeline.add(ends.of(number, [number]))
    fly(pipeline)
    per_stage = 4 if limit_ms == 0.0 else 1
    busy = [len(tick.slices) for tick in engine.ticks]
    filling = (n_stages - 1) * per_stage
    assert len(busy) == n_going * per_stage + filling  # no tick more than the stages need
    assert busy[filling : n_going * per_stage] == [n_stages] * (n_going * per_stage - filling)


def test_a_micro_batch_enters_a_stage_as_the_one_before_it_leaves(ends: Ends) -> None:
    engine = FakeEngine(n_stages=2, layers=2)
    ends.fly(engine, [0], [1])
    assert [list(tick.slices) for tick in engine.ticks] == [
        [Slice(0, 0, 1)],
        [Slice(0, 1, 2)],
        [Slice(0, 2, 3), Slice(1, 0, 1)],
        [Slice(0, 3, 4), Slice(1, 1, 2)],
        [Slice(1, 2, 3)],
        [Slice(1, 3, 4)],
    ]
    assert [[one.id for one in tick.begin] for tick in engine.ticks] == [[0], [], [1], [], [], []]


def test_stages_of_unlike_length_wait_for_each_other_without_a_mix_up(ends: Ends) -> None:
    engine = FakeEngine(n_stages=3)
    engine.stages = [range(1), range(1, 6), range(6, 8)]
    pipeline = pipeline_of(engine)
    for number in range(5):
        pipeline.add(ends.of(number, [number, number + 100]))
    fly(pipeline)
    assert ends.order == list(range(5))
    assert len(engine.ticks) == 1 + 5 * 5 + 2  # the longest stage is never idle


def test_what_comes_later_joins_what_flies(ends: Ends) -> None:
    engine = FakeEngine(n_stages=2, layers=2)
    pipeline = pipeline_of(engine)
    pipeline.add(ends.of(0, [0]))
    for _ in range(3):
        pipeline.run(wait=False)
    pipeline.add(ends.of(1, [1]))
    pipeline.run(wait=False)
    assert list(engine.ticks[-1].slices) == [Slice(0, 3, 4), Slice(1, 0, 1)]
    fly(pipeline)
    assert ends.order == [0, 1]


def test_an_engine_that_cannot_be_cut_gets_whole_stages(ends: Ends) -> None:
    engine = FakeEngine(n_stages=2)
    engine.sliceable = False
    ends.fly(engine, [0])
    assert engine.slices == [Slice(0, 0, 4), Slice(0, 4, 8)]


def test_an_engine_that_cannot_be_cut_gets_micro_batches_whose_whole_stage_is_within_the_limit(
    ends: Ends,
) -> None:
    engine = FakeEngine()
    engine.sliceable, engine.said_s = False, 0.05  # a layer; 4 of them
    pipeline = ends.fly(engine, range(32), limit_ms=50)
    assert pipeline.plan.batch_size(SPEC, 32) == 8


def test_times_go_to_the_plan(ends: Ends) -> None:
    engine = FakeEngine(n_stages=2)
    engine.said_s = 0.02
    ends.fly(engine, range(4), range(4), limit_ms=50)
    of_first = [(one.first, one.end) for one in engine.slices if one.micro_batch == 0]
    # 20 ms a layer: two are within the limit.
    assert of_first == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (6, 8)]


def test_a_tick_tells_the_time_that_the_device_was_busy(ends: Ends) -> None:
    engine = FakeEngine(n_stages=2)
    engine.said_s = 0.02
    pipeline = pipeline_of(engine)
    pipeline.add(ends.of(0, [0]))
    pipeline.add(ends.of(1, [1]))
    busy_s = 0.0
    while not pipeline.is_launched:
        busy_s += pipeline.run(wait=True)
    assert busy_s == pytest.approx(8 * 0.02)  # two micro-batches of 8 layers on two stages
    assert all(tick.wait for tick in engine.ticks)


def test_values_that_are_late_are_waited_for_only_when_nothing_is_to_be_launched(
    ends: Ends,
) -> None:
    engine = FakeEngine(late=True, layers=1)
    pipeline = pipeline_of(engine)
    pipeline.add(ends.of(0, [0]))
    pipeline.add(ends.of(1, [1]))
    pipeline.run(wait=False)
    assert (ends.order, pipeline.is_launched) == ([], False)
    pipeline.run(wait=False)
    assert (ends.order, pipeline.is_launched, pipeline.is_empty) == ([0], True, False)
    pipeline.fetch()
    assert (ends.order, pipeline.is_empty) == ([0, 1], True)
    assert [fetch.fetch for fetch in engine.fetches] == [1]


def test_a_fetch_does_not_wait_for_what_was_launched_behind_the_first(ends: Ends) -> None:
    engine = FakeEngine(layers=1)
    engine.slow = True
    pipeline = pipeline_of(engine)
    for number in range(3):
        pipeline.add(ends.of(number, [number]))
        pipeline.run(wait=False)
    seen = []
    while not pipeline.is_empty:
        pipeline.fetch()
        seen.append([*ends.order])
    assert seen == [[0], [0, 1], [0, 1, 2]]


def test_nothing_is_fetched_where_nothing_was_launched(ends: Ends) -> None:
    engine = FakeEngine()
    pipeline = pipeline_of(engine)
    pipeline.fetch()
    pipeline.add(ends.of(0, [0]))
    pipeline.fetch()
    pipeline.run(wait=False)
    pipeline.fetch()  # its values are far away: chat has the engine
    assert engine.fetches == []
