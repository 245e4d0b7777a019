"""Sizes of micro-batches and of their slices, from how long layers of earlier ones took.

Micro-batches are as large as memory allows, and slices as long as POC_MAX_STEP_MS allows: that is
what makes proofs fast and chat's wait short. Only where one layer of a full micro-batch is longer
than that (CPUs, long sequences) the micro-batch shrinks, down to one nonce. No call into the engine
is to take long, whether or not chat waits: one that does counts as a lost engine.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from itertools import pairwise

from cachetools import LRUCache

from poc_core.records import ProofSpec
from poc_core.schemes import contract_of

# Weight of the newest layer time in the running means: all but a kind's first are steady.
_NEWEST = 0.3
# Kinds of micro-batches remembered: a round and the jobs beside it.
_KINDS_KEPT = 32
# Steps of one slice at most: keeps a call into the engine short where no chat limits it.
_MOST_STEPS = 16
# Sizes of shrunk micro-batches from one power of two to the next. Each size that an engine meets
# costs it memory for good: libraries keep code for it, and on CPUs what it leaves fits no other.
_SIZES = 4
# Largest growth at a time of a shrunk micro-batch: a short one says little about a long one.
_GROWTH = 2


# Scheme, rows of a nonce's first forward, and whether it is one of the steps after that.
_Kind = tuple[str, int, bool]


@dataclass
class _LayerTimes:
    """What is known of one kind of micro-batch."""

    n: int  # nonces of the last one measured
    layer_s: float  # seconds of one of its layers

    @property
    def per_nonce_s(self) -> float:
        return self.layer_s / self.n


class SlicePlan:
    """Sizes for one engine."""

    def __init__(
        self,
        max_step_ms: float | None,
        slices_in_flight: int,
        longest_call_s: float = math.inf,
        token_layer_s: float = 0.0,
    ) -> None:
        """`max_step_ms`: chat's wait for launched slices; None: no chat. The others: see Engine."""
        self._limit_s = math.inf if max_step_ms is None else max_step_ms / 1000 / slices_in_flight
        self._longest_call_s = longest_call_s
        self._token_layer_s = token_layer_s
        # Guards `_times`, which threads that fill micro-batches read.
        self._lock = threading.Lock()
        self._times: LRUCache[_Kind, _LayerTimes] = LRUCache(_KINDS_KEPT)

    def batch_size(self, spec: ProofSpec, most: int, steps: bool = False) -> int:
        """Nonces of the next micro-batch: `most`, or fewer where one layer would last too long.

        `steps`: a layer of one of its steps, else of a forward of all rows.
        """
        kind, limit_s = _kind(spec, steps), min(self._limit_s, self._longest_call_s)
        with self._lock:
            times = self._times.get(kind)
        if times is None:  # too rough for chat's limit
            times, limit_s = self._expected(kind, most), self._longest_call_s
        if times.per_nonce_s * most <= limit_s:
            return most
        fits = min(int(limit_s / times.per_nonce_s), _GROWTH * times.n)
        return most if fits >= most else _step_below(fits)

    def cut(self, spec: ProofSpec, n: int, stage: range) -> list[range]:
        """Slices of one stage for `n` nonces, each as short as the limit wants, about equally long.

        One layer each until a micro-batch of this kind was measured.
        """
        return _cut(stage, self._layers_within_limit(_kind(spec), n, unknown=1))

    def cut_steps(self, spec: ProofSpec, n: int, stage: range) -> tuple[list[range], int]:
        """The slices of one step on one stage and, where that is one, how many steps it may hold.

        A whole step until one was measured.
        """
        layers = self._layers_within_limit(_kind(spec, steps=True), n, unknown=len(stage))
        if layers < len(stage):
            return _cut(stage, layers), 1
        return [stage], int(min(layers, _MOST_STEPS * len(stage))) // len(stage)

    def ran(
        self, spec: ProofSpec, n: int, layers: int, seconds: float, steps: bool = False
    ) -> None:
        """Notes that `layers` layers of `n` nonces kept their stage busy for `seconds`.

        `steps`: of one of its steps, or of several, each of which counts its layers.
        """
        kind, layer_s = _kind(spec, steps), seconds / layers
        with self._lock:
            times = self._times.get(kind)
            if times is None or times.n != n:
                self._times[kind] = _LayerTimes(n, layer_s)
            elif layer_s < times.layer_s / 2:  # the first ones compile and fill caches
                times.layer_s = layer_s
            else:
                times.layer_s += _NEWEST * (layer_s - times.layer_s)

    def _layers_within_limit(self, kind: _Kind, n: int, unknown: int) -> float:
        with self._lock:
            times = self._times.get(kind)
        if times is None:
            if self._limit_s < math.inf:
                return unknown
            times = self._expected(kind, n)
        limit_s = min(self._limit_s, self._longest_call_s)
        if limit_s == math.inf:
            return math.inf
        return max(1, int(limit_s / max(times.per_nonce_s * n, 1e-9)))

    def _expected(self, kind: _Kind, n: int) -> _LayerTimes:
        """Times of a kind that was not measured, by the self-test's."""
        _, rows, steps = kind
        return _LayerTimes(n, self._token_layer_s * n * (1 if steps else rows))


def _cut(stage: range, most: float) -> list[range]:
    """Runs of at most `most` layers, about equally long."""
    n_slices = math.ceil(len(stage) / min(most, len(stage)))
    bounds = [stage.start + round(i * len(stage) / n_slices) for i in range(n_slices + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def _step_below(n: int) -> int:
    """The largest of the sizes of shrunk micro-batches that is at most `n`; at least 1."""
    whole = max(1, n)
    step = max(1, (1 << whole.bit_length() - 1) // _SIZES)
    return whole // step * step


def _kind(spec: ProofSpec, steps: bool = False) -> _Kind:
    return (spec.scheme, contract_of(spec.scheme).passes(spec).rows, steps)
