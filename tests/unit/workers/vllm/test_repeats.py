"""An engine that gives other bits each time is told from one that is wrong."""

import logging
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue

from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes.artifact.encoding import encode_vectors
from workers.engines.base import Tick, TickResult, WholeBatchEngine
from workers.vllm.self_tests import as_near_as_repeats, check_isolation, check_slices

SPEC = ProofSpec(block_hash="warm-up", public_key="warm-up", seq_len=8)
VECTOR = np.arange(12.0)


def artifact(off: float) -> JsonValue:
    """One whose vector lies `off` from that of artifact(0)."""
    return encode_vectors((VECTOR + off * np.eye(12)[0])[None])[0]


class Wavering(WholeBatchEngine):
    """An engine whose values lie off by one of `offs` after the other, and by `sliced` layer by
    layer.
    """

    def __init__(self, offs: Sequence[float], sliced: float | None = 0.0) -> None:
        self.info = ModelInfo("wavering", 64, 4, 64, 256, "bfloat16")
        self.stages = [range(4)]
        self._is_sliced = False
        self._offs: Iterator[float] = cycle(offs)
        self._sliced = sliced

    def tick(self, tick: Tick) -> TickResult:
        self._is_sliced = range(tick.slices[0].first, tick.slices[0].end) not in self.stages
        return super().tick(tick)

    def compute_batch(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        off = self._sliced if self._is_sliced else next(self._offs)
        return [None if off is None else artifact(off) for _ in nonces]

    def close(self) -> None: ...

    def watch(self, n_sequences: int, seq_len: int) -> None: ...

    def unwatch(self) -> list[dict[str, Any]]:
        return [{"touched": [], "replicated": True}]

    def settle(self, private: bool, replicated: bool) -> None:
        self.settled = private


@pytest.mark.parametrize(
    ("offs", "sliced", "near"),
    [
        ([0.0], 0.0, True),
        ([0.0], 0.01, False),
        ([0.0, 0.01], 0.02, True),
        ([0.0, 0.01], 0.5, False),
        ([0.0], None, False),
    ],
    ids=["same", "off by a little", "off by as much as by itself", "off by more", "no value"],
)
def test_layers_may_be_cut_where_the_engine_lies_as_far_from_itself(
    offs: Sequence[float], sliced: float | None, near: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = Wavering(offs, sliced)
    with caplog.at_level(logging.INFO):
        check_slices(engine)
    assert engine.sliceable is near
    assert ("cannot be run one by one" in caplog.text) is not near
    assert ("values of wavering differ by 0.0100 between runs" in caplog.text) is (len(offs) > 1)


def test_an_engine_that_gives_no_values_now_and_then_is_not_near() -> None:
    engine: Any = Wavering([float("inf")])
    engine.compute_batch = lambda *_: [None]
    assert not as_near_as_repeats(engine, SPEC, [0], [artifact(0.0)], lambda: [artifact(0.1)])


@pytest.mark.parametrize("others", [[0.3, 0.0], [0.3, 0.3, 0.0]])
def test_noise_in_one_run_of_several_ends_no_slicing(others: Sequence[float]) -> None:
    """As DeepSeek-V4's on an H200: whole micro-batches were the same three times, one cut by layers
    was not.
    """
    engine, found = Wavering([0.0]), iter(others)
    assert as_near_as_repeats(engine, SPEC, [0], [artifact(0.0)], lambda: [artifact(next(found))])


def test_another_way_that_is_as_the_engines_own_noise_once_is_right() -> None:
    engine: Any = Wavering([0.1, 0.0])
    assert as_near_as_repeats(engine, SPEC, [0], [artifact(0.0)], lambda: [artifact(0.1)])


@pytest.mark.parametrize(
    ("offs", "wavers"), [([0.0, 0.1], False), ([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], True)]
)
def test_why_layers_share_no_cache_is_said(
    offs: Sequence[float], wavers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Shared, private, shared, private and so on."""
    engine: Any = Wavering(offs)
    check_isolation(engine)
    assert engine.info.caches == "private"
    assert engine.settled
    assert "layers of wavering cannot share a cache for proofs: each gets its own" in caplog.text
    assert ("its values differ in each run" in caplog.text) is wavers


@pytest.mark.parametrize("offs", [[0.0, 0.0], [0.2, 0.0, 0.0, 0.0], [0.2, 0.3, 0.1, 0.0, 0.0, 0.1]])
def test_layers_share_a_cache_where_both_ways_gave_the_same_bits_once(
    offs: Sequence[float], caplog: pytest.LogCaptureFixture
) -> None:
    """As GLM-5.3-Flash on an H200, whose first three micro-batches differed, and no later ones."""
    engine: Any = Wavering(offs)
    check_isolation(engine)
    assert engine.info.caches == "shared"
    assert not engine.settled
    assert not caplog.text
