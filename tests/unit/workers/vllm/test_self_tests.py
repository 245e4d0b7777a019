"""The trials of a freshly loaded engine, by engines that fail or pass them."""

import logging
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from pydantic import JsonValue

from poc_core.errors import ProoflineError
from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes.decode.limits import ChainLimits
from workers.engines.base import (
    Engine,
    EngineLostError,
    EngineMemoryError,
    Tick,
    TickResult,
    WholeBatchEngine,
)
from workers.engines.options import EngineOptions, HostSpan
from workers.vllm import self_tests
from workers.vllm.forward.recording import SWITCH
from workers.vllm.self_tests import (
    check_chains,
    check_graphs,
    check_memory,
    check_slices,
    report_speed,
)

HEAD = HostSpan(n_hosts=2, rank=0, head_host="10.0.0.1", head_port=7070)
CHAIN: list[JsonValue] = [3, 14, 10, 12]


class Stepping(WholeBatchEngine):
    """An engine whose chains are CHAIN, or `replayed` by replayed steps; `judged` is what it
    says of claims.
    """

    def __init__(
        self,
        replayed: list[JsonValue] | None = None,
        noisy: bool = False,
        judged: JsonValue = (0, 0.0),  # type: ignore[assignment]
        kept_tokens: int = 4096,
        touched: Sequence[str] = (),
        hidden_size: int = 256,
        why_not: str = "",
        error: ProoflineError | None = None,
    ) -> None:
        self.info = ModelInfo("stepping", hidden_size, 4, 64, 256, "bfloat16")
        self.calls: list[bool] = []
        self._replayed = CHAIN if replayed is None else replayed
        self._noisy, self._n_runs = noisy, 0
        self._judged = judged
        self._kept_tokens = kept_tokens
        self._touched = touched
        self._why_not = why_not
        self._error = error

    def compute_batch(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        if self._error is not None:
            raise self._error
        if spec.options.get("enforced") is not None:
            return [self._judged for _ in nonces]
        if self._noisy:
            self._n_runs += 1
            return [[self._n_runs, *CHAIN[1:]] for _ in nonces]
        return [self._replayed if self.calls and self.calls[-1] else CHAIN for _ in nonces]

    def reserve_for_steps(self) -> int:
        return self._kept_tokens

    def watch(self, n_sequences: int, seq_len: int) -> None:
        self.is_watched = True

    def unwatch(self) -> list[dict[str, Any]]:
        self.is_watched = False
        return [{"touched": list(self._touched), "replicated": True}]

    def settle(self, private: bool, replicated: bool) -> None: ...

    def close(self) -> None: ...

    def use_graphs(self, on: bool) -> dict[str, Any]:
        self.calls.append(on)
        return {"recorded": 1, "why_not": self._why_not}


class TestGraphs:
    def test_stay_on_where_replayed_steps_give_the_same_chain(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine: Any = Stepping()
        with caplog.at_level(logging.INFO):
            check_graphs(engine)
        assert engine.calls == [True, True]
        ours = [one.message for one in caplog.records if one.name.startswith("workers")]
        assert ours == ["steps of decode proofs run as CUDA graphs"]

    def test_stay_on_where_no_two_runs_are_alike(self) -> None:
        engine: Any = Stepping(noisy=True)
        check_graphs(engine)
        assert engine.calls == [True, False, True]

    @pytest.mark.parametrize(
        ("options", "left", "said"),
        [
            (
                {"replayed": [3, 14, 10, 11]},
                False,
                "replayed steps gave [[3, 14, 10, 11], [3, 14, 10, 11]] for",
            ),
            ({"why_not": "a backend that waits"}, True, "a backend that waits"),
        ],
        ids=["another chain", "cannot be recorded"],
    )
    def test_end_with_a_line_in_the_log(
        self, options: dict[str, Any], left: bool, said: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine: Any = Stepping(**options)
        check_graphs(engine)
        assert (engine.calls[0], engine.calls[-1]) == (True, left)
        assert said in caplog.text
        assert "without CUDA graphs with stepping" in caplog.text

    @pytest.mark.parametrize(
        "options", [{"hidden_size": 64}, {"kept_tokens": 16}], ids=["too narrow", "no memory"]
    )
    def test_are_not_tried_where_there_are_no_chains(self, options: dict[str, Any]) -> None:
        engine: Any = Stepping(**options)
        check_chains(engine)
        check_graphs(engine)
        assert engine.calls == []


class Recording(Stepping):
    """An engine of two GPUs that hangs where its environment lets it record steps."""

    on_gpu = True
    started: ClassVar[list[str | None]] = []
    closed = 0

    def __init__(self, options: EngineOptions) -> None:
        super().__init__()
        self.started.append(os.environ.get(SWITCH))
        self.rpc_timeout_s = 600.0

    def use_graphs(self, on: bool) -> dict[str, Any]:
        if os.environ.get(SWITCH) != "off":
            raise EngineLostError(f"No answer within {self.rpc_timeout_s:g} s.")
        return {"recorded": 0, "why_not": f"{SWITCH}=off"}

    def close(self) -> None:
        type(self).closed += 1


class TestAnEngineThatBreaksAsItRecords:
    @pytest.fixture(autouse=True)
    def _engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SWITCH, "on")  # so that it is put back
        monkeypatch.setattr(self_tests, "VllmEngine", Recording)
        monkeypatch.setattr(self_tests, "_GPU_FREE_S", 0.0)
        for passed in ("check_isolation", "check_slices", "check_memory", "report_speed"):
            monkeypatch.setattr(self_tests, passed, lambda *_args, **_options: None)
        Recording.started, Recording.closed = [], 0

    def test_starts_again_without_recorded_steps(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = self_tests.load(EngineOptions(model="m"), 60.0)
        assert Recording.started == ["on", "off"]
        assert Recording.closed == 1
        assert engine.rpc_timeout_s == 60.0
        assert (
            "could not be recorded as CUDA graphs: No answer within 120 s. PROOFLINE_GRAPHS=off"
            " in the environment, on all hosts of an engine, prevents recording."
            " The engine starts again with this setting."
        ) in caplog.text

    def test_tells_hosts_that_have_to_agree(self) -> None:
        several = EngineOptions(model="m", tensor_parallel=2, span=HEAD)
        with pytest.raises(self_tests.RecordingError, match="on all hosts of an engine"):
            self_tests.load(several, 60.0)
        assert Recording.started == ["on"]
        assert Recording.closed == 1


class TestChains:
    def test_that_one_forward_follows_are_taken(self) -> None:
        engine: Any = Stepping()
        check_chains(engine)
        assert ChainLimits.of(engine.info).no_chains == ""
        assert ChainLimits.of(engine.info).kept_tokens == 4096

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (
                {"kept_tokens": 16},
                "There is no memory for the steps of decode proofs (--decode-memory-gb).",
            ),
            ({"judged": [2, 0.3]}, "one forward does not follow the steps"),
            ({"judged": None}, "one forward does not follow the steps"),
            (
                {"touched": ["model.layers.2"]},
                "their steps write into chat's cache of layer model.layers.2",
            ),
            ({"error": ProoflineError("no such kernel")}, "no such kernel"),
        ],
        ids=["no memory", "another point", "not finite", "chat's cache", "an error"],
    )
    def test_are_refused_with_a_sentence(self, options: dict[str, Any], why: str) -> None:
        engine: Any = Stepping(**options)
        check_chains(engine)
        assert why in ChainLimits.of(engine.info).no_chains

    def test_short_memory_is_for_others_to_mend(self) -> None:
        engine: Any = Stepping(error=EngineMemoryError("out of memory"))
        with pytest.raises(EngineMemoryError):
            check_chains(engine)

    def test_failed_steps_leave_no_check_of_later_proofs_on_the_ranks(self) -> None:
        engine: Any = Stepping(error=ProoflineError("a kernel without steps"))
        check_chains(engine)
        assert "a kernel without steps" in ChainLimits.of(engine.info).no_chains
        assert not engine.is_watched


class Short(Engine):
    """An engine that has memory for `room` tokens at a time, and does not stop after a layer."""

    def __init__(self, room: int, sliceable: bool = True) -> None:
        self.info = ModelInfo("short", 256, 4, 4096, 8192, "bfloat16")
        self.sliceable = sliceable
        self.stages = (range(2), range(2, 4))
        self.ticks: list[Tick] = []
        self._room = room

    def tick(self, tick: Tick) -> TickResult:
        self.ticks.append(tick)
        for begin in tick.begin:
            if len(begin.nonces) * begin.spec.seq_len > self._room:
                raise EngineMemoryError("out of memory")
        if any(one.first not in [stage.start for stage in self.stages] for one in tick.slices):
            raise ProoflineError("a model that does not stop after a layer")
        done = [one.micro_batch for one in tick.slices if one.end == self.info.n_layers]
        return TickResult({}, [], {own: [1, 1] for own in done})

    def close(self) -> None: ...


class TestBudget:
    def test_is_halved_until_the_memory_suffices(self, caplog: pytest.LogCaptureFixture) -> None:
        engine: Any = Short(room=2048)
        check_memory(engine, whole=False)
        assert engine.info.max_batch_tokens == 2048
        assert "there is no memory for the requested 8192" in caplog.text
        assert engine.ticks[-1].drop == [0]  # nothing stays on the device

    def test_goes_through_the_first_stage_where_layers_cannot_be_cut(self) -> None:
        engine: Any = Short(room=8192, sliceable=False)
        check_memory(engine, whole=False)
        assert engine.info.max_batch_tokens == 8192
        assert [(one.first, one.end) for one in engine.ticks[0].slices] == [(0, 2)]

    def test_not_even_one_nonce(self) -> None:
        engine: Any = Short(room=512)
        with pytest.raises(EngineMemoryError):
            check_memory(engine, whole=False)


class Joining(WholeBatchEngine):
    """An engine that joins layers where there are few tokens, as vLLM does DeepSeek-V4's: one
    by one they then give nothing finite.
    """

    def __init__(self) -> None:
        self.info = ModelInfo("joining", 256, 4, 4096, 8192, "bfloat16")
        self.stages = [range(4)]
        self._joins = False

    def tick(self, tick: Tick) -> TickResult:
        self._joins = range(tick.slices[0].first, tick.slices[0].end) not in self.stages
        return super().tick(tick)

    def compute_batch(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        return [None if self._joins and len(nonces) * spec.seq_len <= 32 else "AAAA"] * len(nonces)

    def close(self) -> None: ...


def test_layers_are_cut_of_a_model_that_joins_them_for_few_tokens_alone() -> None:
    engine: Any = Joining()
    check_slices(engine)
    assert engine.sliceable


def test_a_model_that_does_not_stop_after_a_layer_is_not_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine: Any = Short(room=8192)
    check_slices(engine)
    assert engine.sliceable is False
    assert "chat waits for whole micro-batches" in caplog.text


def test_what_the_speed_test_measured_plans_the_first_calls() -> None:
    engine: Any = Stepping()
    engine.on_gpu = False
    report_speed(engine)
    assert 0 < engine.token_layer_s < 1
