"""Chooses sizes of micro-batches and of their slices, from measured times of earlier layers.

Micro-batches are as large as memory allows, and slices as long as POC_MAX_STEP_MS. If one layer
takes longer (CPUs, long sequences), the micro-batch shrinks, down to one nonce. Without chat too,
calls must be short, because an engine whose call takes too long counts as lost.
"""

import math
import threading
from dataclasses import dataclass, field
from itertools import pairwise

from cachetools import LRUCache, TTLCache

from poc_core.records import ProofSpec
from poc_core.schemes.contract import contract_of

# Least weight of the newest layer time in the running mean of a size.
_NEWEST = 0.05
# A larger micro-batch is tried if its layers are expected to exceed the limit by this factor at
# most: the estimate may be too high, because some costs do not grow with the nonces. If the layers
# exceed the limit after _SURE measurements, the size is not tried again for _RETRY_S seconds.
_TRY, _SURE, _RETRY_S = 1.15, 8, 600.0
# Kinds of micro-batches remembered: those of a round and of concurrent jobs.
_KINDS_KEPT = 32
# Largest number of steps in a slice: keeps calls into the engine short without chat's limit.
_MOST_STEPS = 16
# Number of allowed sizes of shrunk micro-batches between two powers of two. Each new size costs
# memory permanently: libraries keep code for it, and on CPUs its freed memory fits no other size.
_SIZES = 4
_SIZES_KEPT = 32
# Largest growth factor of a shrunk micro-batch: its time predicts little about much larger ones.
_GROWTH = 2


# Scheme, rows of a nonce's first forward pass, and whether it is a later decode step.
_Kind = tuple[str, int, bool]


@dataclass
class _LayerTimes:
    """The mean seconds per layer of one kind of micro-batch, measured at its most recent size."""

    n: int  # nonces of the last measured micro-batch
    layer_s: float  # seconds of one of its layers
    measured: int = 1  # number of measurements
    too_long: TTLCache[int, bool] = field(default_factory=lambda: TTLCache(_SIZES_KEPT, _RETRY_S))

    @property
    def per_nonce_s(self) -> float:
        return self.layer_s / self.n

    def note(self, n: int, layer_s: float) -> None:
        if n != self.n or layer_s < self.layer_s / 2:  # the first calls compile and fill caches
            self.n, self.layer_s, self.measured = n, layer_s, 1
            return
        self.measured += 1
        self.layer_s += max(_NEWEST, 1 / self.measured) * (layer_s - self.layer_s)

    def most_within(self, limit_s: float, most: int) -> int:
        """Returns the largest number of nonces, up to `most`, for which one layer should take at
        most `limit_s`. Sometimes returns a slightly larger number, to measure whether it fits too.
        """
        if self.layer_s > limit_s and self.measured >= _SURE:
            self.too_long[self.n] = True
        if self.per_nonce_s * most <= limit_s:
            return most
        fits = _step_below(int(min(limit_s / self.per_nonce_s, _GROWTH * self.n)))
        if fits != self.n:
            return fits
        larger = min(fits + _step(fits), most)
        may_fit = self.per_nonce_s * larger <= _TRY * limit_s and larger not in self.too_long
        return larger if may_fit else fits


class SlicePlan:
    """The sizes of micro-batches and slices for one engine, adapted to measured layer times."""

    def __init__(
        self,
        max_step_ms: float | None,
        slices_in_flight: int,
        longest_call_s: float = math.inf,
        token_layer_s: float = 0.0,
    ) -> None:
        """`max_step_ms`: longest delay of chat; None without chat. For the others see Engine."""
        self._limit_s = math.inf if max_step_ms is None else max_step_ms / 1000 / slices_in_flight
        self._longest_call_s = longest_call_s
        self._slice_limit_s = min(self._limit_s, longest_call_s)
        self._token_layer_s = token_layer_s
        # Guards `_times`, which the threads that fill micro-batches also read.
        self._lock = threading.Lock()
        self._times: LRUCache[_Kind, _LayerTimes] = LRUCache(_KINDS_KEPT)

    def batch_size(self, spec: ProofSpec, most: int, steps: bool = False) -> int:
        """Returns the number of nonces for the next micro-batch: `most`, or fewer if a layer would
        take too long. `steps`: True for the layers of decode steps.
        """
        kind, limit_s = _kind(spec, steps), self._slice_limit_s
        with self._lock:
            times = self._times.get(kind)
            if times is None:  # an estimate is too rough for chat's limit
                times, limit_s = self._expected(kind, most), self._longest_call_s
            return times.most_within(limit_s, most)

    def cut(self, spec: ProofSpec, n: int, stage: range) -> list[range]:
        """Cuts a stage's layers into slices for `n` nonces. With chat, each slice has one layer
        until the time of a layer is measured.
        """
        return _cut(stage, self._layers_within_limit(_kind(spec), n, unknown=1))

    def cut_steps(self, spec: ProofSpec, n: int, stage: range) -> tuple[list[range], int]:
        """Cuts a stage's layers in a decode step into slices. Returns the slices, and how many
        steps one slice can contain. With chat, a step is not cut before its time is measured.
        """
        layers = self._layers_within_limit(_kind(spec, steps=True), n, unknown=len(stage))
        if layers < len(stage):
            return _cut(stage, layers), 1
        return [stage], int(min(layers, _MOST_STEPS * len(stage))) // len(stage)

    def ran(
        self, spec: ProofSpec, n: int, layers: int, seconds: float, steps: bool = False
    ) -> None:
        """Records that `layers` layers took `seconds` for `n` nonces. `steps`: True for layers of
        decode steps; `layers` then counts the layers of all steps.
        """
        kind, layer_s = _kind(spec, steps), seconds / layers
        with self._lock:
            times = self._times.get(kind)
            if times is None:
                self._times[kind] = _LayerTimes(n, layer_s)
            # A step of few nonces takes nearly as long as one of many, so its time per nonce would
            # shrink the next micro-batch to a few nonces.
            elif not (steps and n < times.n and layer_s <= times.layer_s <= self._slice_limit_s):
                times.note(n, layer_s)

    def _layers_within_limit(self, kind: _Kind, n: int, unknown: int) -> float:
        with self._lock:
            times = self._times.get(kind)
        if times is None:
            if self._limit_s < math.inf:
                return unknown
            times = self._expected(kind, n)
        if self._slice_limit_s == math.inf:
            return math.inf
        _, _, steps = kind
        # For fewer nonces than measured, a step counts as long as the measured one.
        n_timed = max(n, times.n) if steps else n
        return max(1, int(self._slice_limit_s / max(times.per_nonce_s * n_timed, 1e-9)))

    def _expected(self, kind: _Kind, n: int) -> _LayerTimes:
        """Estimates layer times for a kind of micro-batch that has not been measured yet."""
        _, rows, steps = kind
        return _LayerTimes(n, self._token_layer_s * n * (1 if steps else rows))


def _cut(stage: range, most: float) -> list[range]:
    """Cuts a stage's layers into ranges of about equal length, each of at most `most` layers."""
    n_slices = math.ceil(len(stage) / min(most, len(stage)))
    bounds = [stage.start + round(i * len(stage) / n_slices) for i in range(n_slices + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def _step_below(n: int) -> int:
    """Rounds `n` down to an allowed size of a shrunk micro-batch; at least 1."""
    whole = max(1, n)
    step = _step(whole)
    return whole // step * step


def _step(n: int) -> int:
    return max(1, (1 << n.bit_length() - 1) // _SIZES)


def _kind(spec: ProofSpec, steps: bool = False) -> _Kind:
    return (spec.scheme, contract_of(spec.scheme).passes(spec).rows, steps)
