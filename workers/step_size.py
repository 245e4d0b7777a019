"""How many nonces fit into a micro-batch that may last POC_MAX_STEP_MS, from how long earlier ones took."""

from __future__ import annotations

from dataclasses import dataclass

from poc_core.records import ModelInfo, ProofSpec

# Aimed at, as a fraction of the limit: times vary, and the limit is what chat is promised.
_AIM = 0.8
# Weight of the newest measurement in the running means.
_NEWEST = 0.3
# Mean deviations upwards that are added to the mean, as TCP does for its timeouts: on a machine with other work times
# scatter, and of batches sized by their mean alone many would be too long. Steady times lose 4 % of their size by it.
_DEVIATIONS = 4
# Largest step up at a time: a first small batch says little about a large one.
_GROWTH = 2
# Kinds of batches remembered: a round and the jobs beside it.
_KINDS_KEPT = 32


@dataclass
class _Times:
    """What is known of one kind of batch, in seconds per nonce."""

    mean_s: float
    deviation_s: float = 0.0  # mean of what measurements exceeded the mean by
    largest: int = 1  # nonces of the largest batch measured

    def add(self, measured_s: float) -> None:
        excess_s = measured_s - self.mean_s
        self.deviation_s += _NEWEST * (max(0.0, excess_s) - self.deviation_s)
        # The first batch of a kind compiles and fills caches, so a much faster one replaces what it said.
        self.mean_s = measured_s if measured_s < self.mean_s / 2 else self.mean_s + _NEWEST * excess_s

    @property
    def expected_s(self) -> float:
        return self.mean_s + _DEVIATIONS * self.deviation_s


class StepSize:
    """The size of the next micro-batch, for each kind of batch (scheme and sequence length) by its own times."""

    def __init__(self, info: ModelInfo, max_step_ms: float) -> None:
        self._info = info
        self._aim_s = max_step_ms / 1000 * _AIM
        self._times: dict[tuple[str, int], _Times] = {}

    def next(self, spec: ProofSpec) -> int:
        """Nonces of the next micro-batch: at least one, at most what the engine holds."""
        times = self._times.get((spec.scheme, spec.seq_len))
        if times is None:
            return 1
        fitting = int(self._aim_s / max(times.expected_s, 1e-9))
        return max(1, min(self._info.max_batch(spec.seq_len), fitting, _GROWTH * times.largest))

    def ran(self, spec: ProofSpec, n: int, busy_s: float) -> None:
        """A micro-batch of `n` nonces kept the engine busy for `busy_s`."""
        kind = (spec.scheme, spec.seq_len)
        times = self._times.pop(kind, None)
        if times is None:
            times = _Times(busy_s / n)
        else:
            times.add(busy_s / n)
        times.largest = max(n, times.largest)
        self._times[kind] = times  # at the end: the kinds used last are kept
        while len(self._times) > _KINDS_KEPT:
            del self._times[next(iter(self._times))]
