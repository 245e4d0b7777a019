"""Micro-batches on their way through the stages of an engine, tick by tick."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
from pydantic import JsonValue

from poc_core.errors import ProoflineError, SpecError
from poc_core.records import ProofSpec
from poc_core.schemes.decode.limits import ChainLimits
from tests.harness.samples import SPEC
from tests.peers.fake_engine import FakeEngine, values
from workers.engines import base as ticks
from workers.engines.base import EngineMemoryError, MicroBatch, Slice
from workers.pipeline import Pipeline, compute_all
from workers.slice_plan import SlicePlan

OTHER = SPEC.model_copy(update={"block_hash": "other"})
CHAIN = SPEC.model_copy(update={"scheme": "decode", "options": {"max_tokens": 5}})
LONG = SPEC.model_copy(update={"seq_len": 1024})


class Ends:
    """Micro-batches and how each of them ended, in order."""

    def __init__(self) -> None:
        self.values: dict[int, list[JsonValue]] = {}
        self.errors: dict[int, BaseException] = {}
        self.order: list[int] = []

    def of(self, number: int, nonces: Sequence[int], spec: ProofSpec = SPEC) -> MicroBatch:
        def end(future: Future[Sequence[JsonValue]]) -> None:
            self.order.append(number)
            if error := future.exception():
                self.errors[number] = error
            else:
                self.values[number] = list(future.result())

        micro_batch = MicroBatch(spec, nonces)
        micro_batch.future.add_done_callback(end)  # a future that ends twice raises
        return micro_batch

    def fly(
        self,
        engine: FakeEngine,
        *batches: Sequence[int],
        spec: ProofSpec = SPEC,
        limit_ms: float | None = 0.0,
    ) -> Pipeline:
        """Computes these micro-batches to their ends."""
        pipeline = pipeline_of(engine, limit_ms)
        for number, nonces in enumerate(batches):
            pipeline.add(self.of(number, nonces, spec))
        fly(pipeline)
        return pipeline


@pytest.fixture(autouse=True)
def ids_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "_IDS", itertools.count())


@pytest.fixture
def ends() -> Ends:
    return Ends()


def pipeline_of(engine: FakeEngine, limit_ms: float | None = 0.0) -> Pipeline:
    """`limit_ms`: 0 for slices of one layer, None for whole stages."""
    return Pipeline(engine, SlicePlan(limit_ms, 1))


def fly(pipeline: Pipeline) -> None:
    """As Proofs does it while chat is idle."""
    for _ in range(5000):
        if pipeline.is_empty:
            return
        if pipeline.is_launched:
            pipeline.fetch()
        else:
            pipeline.run(wait=False)
    raise AssertionError("it never ends")


def out_of_memory() -> None:
    raise EngineMemoryError("out of memory")


def break_down() -> None:
    raise ProoflineError("it broke")


# The schedule.


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
        pipeline.add(ends.of(number, nonces, OTHER if number % 2 else SPEC))
    fly(pipeline)
    assert ends.order == list(range(7))
    assert ends.values == {
        n: values(OTHER if n % 2 else SPEC, nonces) for n, nonces in enumerate(batches)
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
    with pytest.raises(ProoflineError, match="it broke"):
        fly(pipeline)
    assert ends.order == [0, 1]


# Refusals and failures.


@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_refused_spec_ends_its_micro_batch_alone(ends: Ends, n_stages: int) -> None:
    engine = FakeEngine(n_stages)
    engine.refuse["other"] = "k_dim must be at most 128."
    pipeline = pipeline_of(engine)
    for number, spec in enumerate([SPEC, OTHER, SPEC]):
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
    with pytest.raises(ProoflineError, match="it broke") as raised:
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


# Callers who have the engine for themselves.


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("limit_ms", [None, 0.0])
def test_compute_gives_one_value_per_nonce_in_order(n_stages: int, limit_ms: float | None) -> None:
    engine = FakeEngine(n_stages, late=True)
    nonces = list(range(300, 0, -1))
    assert compute_all(engine, SPEC, nonces, SlicePlan(limit_ms, 1)) == values(SPEC, nonces)
    assert [len(begun) for begun in engine.begun] == [128, 128, 44]
    assert engine.is_idle


@pytest.mark.parametrize("n_stages", [1, 2])
def test_compute_keeps_its_first_call_short_on_an_engine_that_the_self_test_found_slow(
    n_stages: int,
) -> None:
    engine = FakeEngine(n_stages)
    engine.longest_call_s, engine.token_layer_s = 10.0, 0.02
    assert compute_all(engine, SPEC, range(20)) == values(SPEC, range(20))
    assert [len(begun) for begun in engine.begun] == [7, 7, 6]
    assert engine.slices[0] == Slice(0, 0, 1)


def test_compute_cuts_nothing_unless_asked() -> None:
    engine = FakeEngine()
    compute_all(engine, SPEC, [1])
    assert engine.slices == [Slice(0, 0, 4)]


def test_no_two_micro_batches_of_an_engine_have_one_id_as_times_may_come_late() -> None:
    engine = FakeEngine()
    for _ in range(2):
        compute_all(engine, SPEC, [0])
    assert [one.id for tick in engine.ticks for one in tick.begin] == [0, 1]


def test_compute_asks_nothing_of_the_engine_for_no_nonces() -> None:
    engine = FakeEngine()
    assert compute_all(engine, SPEC, []) == []
    assert engine.ticks == []


@pytest.mark.parametrize(
    ("event", "kind"),
    [(break_down, ProoflineError), (out_of_memory, EngineMemoryError)],
    ids=["error", "memory"],
)
def test_compute_raises_what_the_engine_raises(
    event: Callable[[], object], kind: type[ProoflineError]
) -> None:
    engine = FakeEngine()
    engine.events[0] = event
    with pytest.raises(kind):
        compute_all(engine, SPEC, [1])


def test_compute_halves_what_does_not_fit() -> None:
    engine = FakeEngine(n_stages=2)
    engine.memory, engine.memory_error = 1000, out_of_memory
    assert compute_all(engine, SPEC, range(300)) == values(SPEC, range(300))
    assert engine.info.max_batch_tokens == 512


def test_compute_raises_a_refusal_and_a_seq_len_beyond_the_limit() -> None:
    engine = FakeEngine()
    engine.refuse["other"] = "no"
    with pytest.raises(SpecError, match="no"):
        compute_all(engine, OTHER, [1])
    with pytest.raises(SpecError, match="from 1 to 1024"):
        compute_all(engine, SPEC.model_copy(update={"seq_len": 1025}), [])


# Micro-batches that go on step by step.


def test_a_chain_is_its_prefill_in_slices_and_then_its_steps(ends: Ends) -> None:
    engine = FakeEngine()
    engine.said_s = 0.005  # a layer; 4 of them
    ends.fly(engine, range(3), spec=CHAIN, limit_ms=50)
    prefill = [Slice(0, layer, layer + 1) for layer in range(4)]
    assert engine.slices[:4] == prefill
    # One whole step to be measured, then as many as the limit allows: two of 20 ms.
    assert engine.slices[4:] == [Slice(0, 0, 4, 1, 2), Slice(0, 0, 4, 2, 4), Slice(0, 0, 4, 4, 6)]
    assert ends.values == {0: values(CHAIN, range(3))}


def test_a_step_that_is_longer_than_the_limit_is_cut_between_layers(ends: Ends) -> None:
    engine = FakeEngine()
    engine.said_s = 0.03
    ends.fly(engine, [0], spec=CHAIN, limit_ms=70)
    assert engine.slices[-4:] == [
        Slice(0, 0, 2, 4, 5),
        Slice(0, 2, 4, 4, 5),
        Slice(0, 0, 2, 5, 6),
        Slice(0, 2, 4, 5, 6),
    ]
    assert ends.order == [0]


def test_steps_of_several_chains_share_the_stages(ends: Ends) -> None:
    """Each step goes through all stages before the next; meanwhile the others' have the rest."""
    engine = FakeEngine(n_stages=3, layers=2)
    ends.fly(engine, *([n] for n in range(4)), spec=CHAIN, limit_ms=None)
    assert sorted(ends.order) == [0, 1, 2, 3]
    assert len([tick for tick in engine.ticks if len(tick.slices) == 3]) >= 2 * 6
    for tick in engine.ticks:  # no more at a time than there are places to keep what they have seen
        assert len({one.micro_batch for one in tick.slices}) <= 3


def test_no_more_chains_fly_than_have_a_place(ends: Ends) -> None:
    engine = FakeEngine(n_stages=2, layers=2)
    pipeline = pipeline_of(engine, limit_ms=0.0)
    for number in range(5):
        pipeline.add(ends.of(number, [number], CHAIN if number % 2 else SPEC))
    most = 0
    while not pipeline.is_empty:
        pipeline.fetch() if pipeline.is_launched else pipeline.run(wait=False)
        most = max(most, engine.n_going)
    assert most <= 2
    assert sorted(ends.order) == list(range(5))


def test_a_chain_of_more_nonces_than_there_is_memory_for_goes_in_parts(ends: Ends) -> None:
    engine = FakeEngine()
    engine.info = ChainLimits(kept_tokens=320, kept_block=32).on(engine.info)
    ends.fly(engine, range(7), spec=CHAIN, limit_ms=None)  # 69 positions, so 96 of 320 each
    assert [len(nonces) for nonces in engine.begun] == [3, 3, 1]
    assert ends.values == {0: values(CHAIN, range(7))}


def test_the_prefill_of_more_nonces_than_one_forward_holds_goes_in_parts(ends: Ends) -> None:
    engine = FakeEngine()
    engine.info = ChainLimits(kept_tokens=4096).on(
        dataclasses.replace(engine.info, max_batch_tokens=3 * 64)
    )
    ends.fly(engine, range(7), spec=CHAIN, limit_ms=None)
    assert [len(nonces) for nonces in engine.begun] == [7]
    assert engine.ticks[0].begin[0].part == 3
    assert engine.slices == [
        *(Slice(0, 0, 4, part, part + 1) for part in range(3)),
        Slice(0, 0, 4, 3, 8),
    ]
    assert ends.values == {0: values(CHAIN, range(7))}


def test_a_chain_begins_anew_where_memory_is_short_between_two_steps(ends: Ends) -> None:
    engine = FakeEngine()
    engine.info = ChainLimits(kept_tokens=1024).on(engine.info)
    pipeline = pipeline_of(engine, limit_ms=0.0)

    def short() -> None:
        raise EngineMemoryError("too little")

    engine.events[6] = short
    pipeline.add(ends.of(0, range(4), CHAIN))
    fly(pipeline)
    assert [len(nonces) for nonces in engine.begun] == [4, 2, 2]
    assert ends.values == {0: values(CHAIN, range(4))}


def test_a_chain_without_memory_halves_its_forwards_and_what_it_keeps(ends: Ends) -> None:
    engine = FakeEngine()
    engine.info = ChainLimits(kept_tokens=4096, kept_block=32).on(
        dataclasses.replace(engine.info, max_batch_tokens=3 * 64)
    )
    pipeline = pipeline_of(engine, limit_ms=None)
    engine.events[0] = out_of_memory
    pipeline.add(ends.of(0, range(7), CHAIN))  # 69 positions, so 96 each
    fly(pipeline)
    assert engine.info.max_batch_tokens == 3 * 64 // 2
    assert ChainLimits.of(engine.info).kept_tokens == 3 * 96
    assert [len(nonces) for nonces in engine.begun] == [7, 3, 3, 1]
    assert ends.values == {0: values(CHAIN, range(7))}


def test_the_largest_of_those_under_way_is_halved(ends: Ends) -> None:
    engine = FakeEngine(n_stages=2)
    pipeline = pipeline_of(engine)
    engine.events[5] = out_of_memory
    pipeline.add(ends.of(0, range(8)))
    pipeline.add(ends.of(1, range(2)))
    fly(pipeline)
    assert engine.info.max_batch_tokens == 8 * 64 // 2
    assert ends.values == {0: values(SPEC, range(8)), 1: values(SPEC, range(2))}


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_what_has_ended_is_forgotten(ends: Ends, n_stages: int) -> None:
    """Except those whose durations a late tick may still report."""
    engine = FakeEngine(n_stages)
    pipeline = ends.fly(engine, *([n] for n in range(20)), limit_ms=None)
    assert len(vars(pipeline)["_measured"]) <= n_stages + 1


def test_known_claims_need_no_steps(ends: Ends) -> None:
    engine = FakeEngine()
    claimed = CHAIN.model_copy(update={"options": {"max_tokens": 5, "enforced": {"0": [1] * 6}}})
    ends.fly(engine, [0], spec=claimed, limit_ms=None)
    assert engine.slices == [Slice(0, 0, 4)]
