import time
from typing import Any

import pytest

from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.encoding import decode_vector
from workers.engines.base import MicroBatch, Slice, Tick
from workers.engines.options import EngineOptions
from workers.engines.synthetic import SyntheticEngine
from workers.load import load_engine
from workers.pipeline import compute_all

SPEC = ProofSpec(block_hash="block", public_key="key", seq_len=64)
DISTANCE = ProofSpec(scheme="distance", block_hash="block", public_key="key", seq_len=64)


def synthetic(**options: Any) -> Any:
    return EngineOptions(model="load-test", engine="synthetic", **options)


@pytest.fixture
def engine() -> Any:
    return SyntheticEngine(synthetic(synthetic_step_ms=0))


def test_synthetic_takes_its_set_time(engine: Any) -> None:
    engine = SyntheticEngine(synthetic(synthetic_step_ms=40))
    start = time.monotonic()
    compute_all(engine, SPEC, list(range(32)))
    assert time.monotonic() - start >= 0.04


def test_synthetic_values_follow_from_spec_and_nonce(engine: Any) -> None:
    values = compute_all(engine, SPEC, [5, 6, 2**63 - 1])
    assert compute_all(engine, SPEC, [2**63 - 1, 5]) == [values[2], values[0]]
    assert len(set(values)) == 3
    assert compute_all(engine, SPEC.model_copy(update={"block_hash": "other"}), [5]) != values[:1]


def test_synthetic_artifacts_can_be_decoded(engine: Any) -> None:
    spec = SPEC.model_copy(update={"options": {"k_dim": 7}})
    assert all(decode_vector(value, 7).shape == (7,) for value in compute_all(engine, spec, [0, 1]))


def test_synthetic_distances_are_distances(engine: Any) -> None:
    assert all(0 < distance < 2 for distance in compute_all(engine, DISTANCE, list(range(100))))


def test_synthetic_computes_nothing_for_no_nonces(engine: Any) -> None:
    assert compute_all(engine, SPEC, []) == compute_all(engine, DISTANCE, []) == []


@pytest.mark.parametrize(
    "spec",
    [
        SPEC.model_copy(update={"scheme": "unknown"}),
        SPEC.model_copy(update={"seq_len": 0}),
        SPEC.model_copy(update={"options": {"k_dim": 0}}),
    ],
)
def test_synthetic_refuses_bad_specs_like_an_engine(engine: Any, spec: Any) -> None:
    with pytest.raises(SpecError):
        compute_all(engine, spec, [1])


class Recording(SyntheticEngine):
    """Writes down its micro-batches."""

    batches: list[list[int]]

    def compute_batch(self, spec: Any, nonces: Any) -> Any:
        self.batches.append(list(nonces))
        return super().compute_batch(spec, nonces)


@pytest.fixture
def recording() -> Any:
    engine = Recording(synthetic(synthetic_step_ms=0))
    engine.batches = []
    return engine


def test_micro_batches_hold_no_more_tokens_than_allowed(recording: Any) -> None:
    spec = SPEC.model_copy(update={"seq_len": recording.info.max_batch_tokens // 3})
    compute_all(recording, spec, range(7))
    assert recording.batches == [[0, 1, 2], [3, 4, 5], [6]]


def test_micro_batches_hold_no_more_nonces_than_allowed(recording: Any) -> None:
    compute_all(recording, SPEC, range(70))
    assert [len(batch) for batch in recording.batches] == [32, 32, 6]


def test_a_nonce_longer_than_half_a_micro_batch_goes_alone(recording: Any) -> None:
    compute_all(recording, SPEC.model_copy(update={"seq_len": recording.info.max_seq_len}), [4, 5])
    assert recording.batches == [[4], [5]]


def test_a_seq_len_beyond_the_models_limit_is_refused_with_the_limit(recording: Any) -> None:
    limit = recording.info.max_seq_len
    with pytest.raises(SpecError, match=f"from 1 to {limit} for model load-test, not {limit + 1}"):
        compute_all(recording, SPEC.model_copy(update={"seq_len": limit + 1}), [1])
    assert recording.batches == []


def test_an_engine_that_runs_whole_batches_says_how_long_each_took(recording: Any) -> None:
    engine = Recording(synthetic(synthetic_step_ms=20))
    engine.batches = []
    began = time.monotonic()
    answer = engine.tick(Tick(begin=[MicroBatch(SPEC, [0, 1], id=7)], slices=[Slice(7, 0, 1)]))
    assert list(answer.values) == [7]
    ((ran, seconds),) = answer.ran
    assert ran == Slice(7, 0, 1)
    assert 0.02 <= seconds <= time.monotonic() - began


def test_an_engine_that_runs_whole_batches_refuses_a_spec_for_its_micro_batch_alone(
    recording: Any,
) -> None:
    refused = SPEC.model_copy(update={"scheme": "unknown"})
    answer = recording.tick(
        Tick(begin=[MicroBatch(refused, [0], id=0), MicroBatch(SPEC, [1], id=1)])
    )
    assert list(answer.refused) == [0]
    assert "unknown" in answer.refused[0]
    assert list(answer.values) == [1]


def test_load_engine_knows_engines_by_kind() -> None:
    loaded = load_engine(synthetic(served_model_name="m"))
    assert (type(loaded).__name__, loaded.info.name) == ("SyntheticEngine", "m")
    assert load_engine(synthetic()).info.name == "load-test"
