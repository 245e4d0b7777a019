"""Speeds of an engine whose layers take a known time, on a clock of its own."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from lab.measure import speed
from poc_core.errors import ProoflineError, SpecError
from poc_core.records import ModelInfo, ProofSpec
from workers.engines.base import (
    Engine,
    EngineLostError,
    EngineMemoryError,
    RankProfile,
    Tick,
    TickResult,
)

SPEC = ProofSpec(block_hash="b", public_key="p", seq_len=16, options={})
LAYERS = 8


class TimedEngine(Engine):
    """A layer takes `token_s` a token; stages work at the same time. `clock_s` is what it all
    took.
    """

    def __init__(self, n_stages: int = 1, token_s: float = 0.001) -> None:
        self.info = ModelInfo("timed", 8, LAYERS, 64, 512, "float32")
        per_stage = LAYERS // n_stages
        self.stages = [range(i * per_stage, (i + 1) * per_stage) for i in range(n_stages)]
        self.token_s = token_s
        self.clock_s = 0.0
        self.refuses = False
        self._nonces: dict[int, Sequence[int]] = {}

    def tick(self, tick: Tick) -> TickResult:
        values: dict[int, Any] = {}
        ran = []
        for begun in tick.begin:
            self._nonces[begun.id] = begun.nonces
        if self.refuses:
            return TickResult(refused=dict.fromkeys(self._nonces, "no such k_dim"))
        for one in tick.slices:
            nonces = self._nonces[one.micro_batch]
            ran.append((one, (one.end - one.first) * len(nonces) * SPEC.seq_len * self.token_s))
            if one.end == LAYERS:
                values[one.micro_batch] = list(nonces)
        self.clock_s += max((seconds for _, seconds in ran), default=0.0)
        return TickResult(ran=ran, values=values)

    def close(self) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TimedEngine:
    timed = TimedEngine()
    on_its_clock(timed, monkeypatch)
    return timed


def on_its_clock(engine: TimedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: engine.clock_s)


@pytest.mark.parametrize(
    ("most", "expected"), [(32, [2, 8, 16, 32]), (512, [2, 8, 32, 128, 256, 512]), (1, [1])]
)
def test_sizes_reach_from_a_few_nonces_to_what_fits(most: int, expected: list[int]) -> None:
    assert speed.sizes(most) == expected


# 8 layers of 4 * 16 tokens take 0.512 s, one of them 64 ms.
@pytest.mark.parametrize(("limit_ms", "n_slices", "waits_ms"), [(None, 1, 512), (200, 3, 192)])
def test_slices_are_as_short_as_the_limit_wants(
    engine: TimedEngine, limit_ms: float | None, n_slices: int, waits_ms: float
) -> None:
    found = speed.speed(engine, SPEC, 4, limit_ms, seconds=5)
    assert (found.n, found.n_slices) == (4, n_slices)
    assert found.nonces_per_s == pytest.approx(4 / 0.512)
    assert found.chat_waits_ms == pytest.approx(waits_ms)


def test_chat_waits_for_every_slice_that_may_be_on_the_device(engine: TimedEngine) -> None:
    engine.slices_in_flight = 2
    found = speed.speed(engine, SPEC, 4, 200, seconds=5)
    assert found.n_slices == 8
    assert found.chat_waits_ms == pytest.approx(128)


def test_without_a_size_micro_batches_are_those_that_a_worker_would_take(
    engine: TimedEngine,
) -> None:
    assert speed.speed(engine, SPEC, None, None, seconds=1).n == engine.info.max_batch(16) == 32
    assert speed.speed(engine, SPEC, None, 100, seconds=20).n == 6  # of which a layer takes 96 ms


def test_stages_of_a_pipeline_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TimedEngine(n_stages=2)
    on_its_clock(engine, monkeypatch)
    assert speed.speed(engine, SPEC, 4, None, seconds=5).nonces_per_s == pytest.approx(4 / 0.256)


def test_all_about_a_seq_len(engine: TimedEngine) -> None:
    steps: list[None] = []
    found = speed.measure(engine, SPEC, [2, 8], 200, [50, 100], 1.0, lambda: steps.append(None))
    assert len(steps) == speed.n_steps(2, 2)
    assert [(whole.n, sliced.n) for whole, sliced in found.sizes] == [(2, 2), (8, 8)]
    assert found.best == pytest.approx(1 / 0.128)
    assert [trade.max_step_ms for trade in found.trades] == [50, 100]
    assert [trade.lost for trade in found.trades] == pytest.approx([0, 0], abs=0.01)
    assert found.parts is None


@pytest.mark.parametrize(
    "error",
    [EngineMemoryError("out of memory"), EngineLostError("no answer"), ProoflineError("no CUPTI")],
    ids=["no memory", "no answer", "no profiler"],
)
def test_speeds_are_not_lost_with_the_profile(
    engine: TimedEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: ProoflineError,
) -> None:
    def profile(spec: ProofSpec, nonces: Sequence[int]) -> list[RankProfile]:
        raise error

    monkeypatch.setattr(engine, "profile", profile)
    found = speed.measure(engine, SPEC, [2], 200, [50], 1.0, lambda: None)
    assert found.parts is None
    assert found.best > 0
    assert f"at seq_len 16 cannot be divided into parts: {error}" in capsys.readouterr().err


def test_the_engines_errors_pass_through(engine: TimedEngine) -> None:
    engine.refuses = True
    with pytest.raises(SpecError, match="no such k_dim"):
        speed.speed(engine, SPEC, 4, None, seconds=1)
