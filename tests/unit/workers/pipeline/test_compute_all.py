"""`compute` returns the values of nonces to one caller."""

from collections.abc import Callable

import pytest

from poc_core.errors import ProoflineError, SpecError
from tests.harness.pipeline import out_of_memory
from tests.harness.samples import OTHER_SPEC, SPEC
from tests.peers.fake_engine import FakeEngine, break_down, values
from workers.engines.base import EngineMemoryError, Slice
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan


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
        compute_all(engine, OTHER_SPEC, [1])
    with pytest.raises(SpecError, match="from 1 to 1024"):
        compute_all(engine, SPEC.model_copy(update={"seq_len": 1025}), [])
