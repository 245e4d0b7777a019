"""Micro-batches that go on step by step."""

import dataclasses

import pytest

from poc_core.schemes.decode.limits import ChainLimits
from tests.harness.pipeline import Ends, fly, out_of_memory, pipeline_of
from tests.harness.samples import SPEC
from tests.peers.fake_engine import FakeEngine, values
from workers.engines.base import EngineMemoryError, Slice

CHAIN = SPEC.model_copy(update={"scheme": "decode", "options": {"max_tokens": 5}})


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


def test_forwards_of_one_nonce_are_not_halved(ends: Ends) -> None:
    engine = FakeEngine()
    engine.info = ChainLimits(kept_tokens=4096, kept_block=32).on(
        dataclasses.replace(engine.info, max_batch_tokens=64)
    )
    engine.events[0] = out_of_memory
    ends.fly(engine, range(4), spec=CHAIN, limit_ms=None)
    assert engine.info.max_batch_tokens == 64  # with fewer the engine would refuse every nonce
    assert ChainLimits.of(engine.info).kept_tokens == 2 * 96
    assert ends.values == {0: values(CHAIN, range(4))}


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
