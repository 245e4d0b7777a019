"""How large micro-batches and their slices are, from how long the layers of earlier ones took.

Micro-batches are as large as memory allows, and slices as long as POC_MAX_STEP_MS allows: that is what makes proofs
fast and chat's wait short. Only where one layer of a full micro-batch is longer than that (CPUs, long sequences) the
micro-batch shrinks, down to one nonce.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from itertools import pairwise

from cachetools import LRUCache

from poc_core.records import ProofSpec

# Weight of the newest measurement in the running means: layers' times are steady, the first ones of a kind are not.
_NEWEST = 0.3
# Kinds of micro-batches remembered: a round and the jobs beside it.
_KINDS_KEPT = 32
# Largest step up at a time of a micro-batch that was made small: a short one says little about a long one.
_GROWTH = 2


@dataclass
class _LayerTimes:
    """What is known of one kind of micro-batch."""

    n: int  # nonces of the last one measured
    layer_s: float  # seconds of one of its layers

    @property
    def per_nonce_s(self) -> float:
        return self.layer_s / self.n


class SlicePlan:
    """Sizes for one engine. `max_step_ms`: what chat may wait for proofs that are launched already; None: no chat."""

    def __init__(self, max_step_ms: float | None, slices_in_flight: int) -> None:
        self._limit_s = math.inf if max_step_ms is None else max_step_ms / 1000 / slices_in_flight
        self._lock = threading.Lock()  # the cache's, which is read by the threads that fill micro-batches
        self._times: LRUCache[tuple[str, int], _LayerTimes] = LRUCache(_KINDS_KEPT)

    def batch_size(self, spec: ProofSpec, most: int) -> int:
        """Nonces of the next micro-batch: `most` that fit, or fewer where one layer of them would last too long."""
        with self._lock:
            times = self._times.get(_kind(spec))
            if times is None or times.per_nonce_s * most <= self._limit_s:
                return most
            return max(1, min(most, int(self._limit_s / times.per_nonce_s), _GROWTH * times.n))

    def cut(self, spec: ProofSpec, n: int, stage: range) -> list[range]:
        """The slices of one stage for a micro-batch of `n` nonces, each as short as the limit wants, about equally
        long.

        One layer each until a micro-batch of this kind was measured.
        """
        with self._lock:
            times = self._times.get(_kind(spec))
        if self._limit_s == math.inf:
            layers = len(stage)
        elif times is None:
            layers = 1
        else:
            layers = int(self._limit_s / max(times.per_nonce_s * n, 1e-9))
        n_slices = math.ceil(len(stage) / min(max(layers, 1), len(stage)))
        bounds = [stage.start + round(i * len(stage) / n_slices) for i in range(n_slices + 1)]
        return [range(first, end) for first, end in pairwise(bounds)]

    def ran(self, spec: ProofSpec, n: int, layers: int, seconds: float) -> None:
        """A slice of `layers` layers of a micro-batch of `n` nonces kept its stage busy for `seconds`."""
        kind, layer_s = _kind(spec), seconds / layers
        with self._lock:
            times = self._times.get(kind)
            if times is None or times.n != n:
                self._times[kind] = _LayerTimes(n, layer_s)
            elif layer_s < times.layer_s / 2:  # the first ones compile and fill caches
                times.layer_s = layer_s
            else:
                times.layer_s += _NEWEST * (layer_s - times.layer_s)


def _kind(spec: ProofSpec) -> tuple[str, int]:
    return (spec.scheme, spec.seq_len)
