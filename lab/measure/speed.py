"""Measures how many nonces per second an engine computes, in complete micro-batches and in
micro-batches cut into slices.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cli.terminal import note
from lab.measure.time_parts import TimeParts, time_parts
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from workers.engines.base import Engine, MicroBatch
from workers.pipeline import Pipeline
from workers.slice_plan import SlicePlan

# Micro-batches before the measurement: they compile, fill caches and adapt slice sizes.
_WARM_UP = 3
# Fewest micro-batches that are measured.
_FEWEST = 2
# Alternations between complete micro-batches and slices, because a device's clock varies.
_TURNS = 2


@dataclass(frozen=True)
class Speed:
    n: int  # nonces of a micro-batch
    nonces_per_s: float
    n_slices: int  # of a micro-batch on each pipeline stage
    chat_waits_ms: float  # longest wait: for the longest slices that may be on the device together


@dataclass(frozen=True)
class Trade:
    """The speed with one limit on the time that chat waits for a slice, and the share of speed that
    this limit costs.
    """

    max_step_ms: float
    sliced: Speed
    lost: float  # share of the rate of complete micro-batches in the same turn


@dataclass(frozen=True)
class SeqLenSpeeds:
    seq_len: int
    # complete and in slices, by nonces of a micro-batch, in ascending order
    sizes: Sequence[tuple[Speed, Speed]]
    trades: Sequence[Trade]  # by max_step_ms
    parts: TimeParts | None  # of the largest micro-batch

    @property
    def best(self) -> float:
        """Returns the highest rate among complete micro-batches, in nonces per second."""
        return max(whole.nonces_per_s for whole, _ in self.sizes)


@dataclass(frozen=True)
class Speeds:
    model: str
    engine: str
    dtype: str
    dummy_weights: bool
    tensor_parallel: int
    pipeline_parallel: int
    max_batch_tokens: int
    max_step_ms: float  # limit of the slices in `sizes`
    seconds: float  # least time of each measurement
    seq_lens: Sequence[SeqLenSpeeds]

    @property
    def n_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


class _WatchedPlan(SlicePlan):
    """A slice plan that records how long each slice took."""

    def __init__(self, max_step_ms: float | None, slices_in_flight: int) -> None:
        super().__init__(max_step_ms, slices_in_flight)
        self.ran_s: list[float] = []

    def ran(
        self, spec: ProofSpec, n: int, layers: int, seconds: float, steps: bool = False
    ) -> None:
        super().ran(spec, n, layers, seconds, steps)
        self.ran_s.append(seconds)


def spec_of(seq_len: int) -> ProofSpec:
    """Returns the spec of the proofs that are measured: artifacts for the block hash "bench" and
    the key "bench".
    """
    return ProofSpec(block_hash="bench", public_key="bench", seq_len=seq_len, options={})


def sizes(most: int) -> list[int]:
    """Returns the micro-batch sizes to measure, in nonces, ascending: `most`, 1/2, 1/4, 1/16, 1/64
    of it, and so on down to 1.
    """
    found = {most, max(1, most // 2)}
    size = most // 4
    while size >= 1:
        found.add(size)
        size //= 4
    return sorted(found)


def speed(
    engine: Engine, spec: ProofSpec, n: int | None, max_step_ms: float | None, seconds: float
) -> Speed:
    """Measures how fast the engine computes micro-batches of `n` nonces, cut into slices as a
    worker does. If `n` is None, their size is the one that a worker would choose.

    `max_step_ms`: limit of a slice in milliseconds; None means complete micro-batches. Takes at
    least `seconds`, after a warm-up. Raises the engine's errors.
    """
    plan = _WatchedPlan(max_step_ms, engine.slices_in_flight)
    _run(engine, spec, plan, n, lambda begun: begun < (_WARM_UP if max_step_ms else 1))
    plan.ran_s.clear()
    began = time.perf_counter()
    ends_at = began + seconds
    ended = _run(
        engine, spec, plan, n, lambda begun: begun < _FEWEST or time.perf_counter() < ends_at
    )
    # Excludes the first micro-batch's way through the earlier stages, which happens only once.
    steady_s = (time.perf_counter() - began) * len(ended) / (len(ended) + len(engine.stages) - 1)
    return Speed(
        n=ended[-1],
        nonces_per_s=sum(ended) / steady_s,
        n_slices=max(1, round(len(plan.ran_s) / len(ended) / len(engine.stages))),
        chat_waits_ms=1000 * engine.slices_in_flight * max(plan.ran_s, default=0.0),
    )


def _run(
    engine: Engine, spec: ProofSpec, plan: SlicePlan, n: int | None, goes_on: Callable[[int], bool]
) -> Sequence[int]:
    """Runs micro-batches of `n` nonces, and starts new ones while `goes_on` returns True. Returns
    the size of each completed micro-batch, in nonces.

    `goes_on` gets the number of micro-batches started so far. Enough of them are in progress to
    keep all pipeline stages busy.
    """
    pipeline = Pipeline(engine, plan)
    most = engine.info.max_batch(spec.seq_len)
    going: deque[MicroBatch] = deque()
    ended: list[int] = []
    while True:
        while len(going) <= len(engine.stages) and goes_on(begun := len(ended) + len(going)):
            size = min(most, n) if n else plan.batch_size(spec, most)
            going.append(MicroBatch(spec, range(begun * most, begun * most + size)))
            pipeline.add(going[-1])
        if pipeline.is_empty:
            return ended
        if pipeline.is_launched:
            pipeline.fetch()
        else:
            pipeline.run(wait=False)
        while going and going[0].future.done():
            ended.append(len(going.popleft().future.result()))


def n_steps(n_sizes: int, n_limits: int) -> int:
    """Returns how often `measure` calls `on_step`: the number of steps for a progress bar."""
    return 2 * n_sizes + _TURNS * (1 + n_limits) + 1


def measure(
    engine: Engine,
    spec: ProofSpec,
    counts: Sequence[int],
    max_step_ms: float,
    limits_ms: Sequence[float],
    seconds: float,
    on_step: Callable[[], None],
) -> SeqLenSpeeds:
    """Makes all measurements at one seq_len.

    `counts`: micro-batch sizes in nonces. `max_step_ms`: limit of the slices when sizes are
    measured. `limits_ms`: limits whose cost is measured. `on_step`: called after each measurement.
    """

    def measured(n: int | None, limit_ms: float | None) -> Speed:
        found = speed(engine, spec, n, limit_ms, seconds)
        on_step()
        return found

    by_size = [(measured(n, None), measured(n, max_step_ms)) for n in counts]
    turns = [[measured(None, limit_ms) for limit_ms in (None, *limits_ms)] for _ in range(_TURNS)]
    most = engine.info.max_batch(spec.seq_len)
    try:
        parts = time_parts(engine.profile(spec, range(most)), most)
    # profiling needs memory for the peak's matrices, and tools that may be missing
    except ProoflineError as error:
        note(f"The time at seq_len {spec.seq_len} cannot be divided into parts: {error}")
        parts = None
    on_step()
    return SeqLenSpeeds(spec.seq_len, by_size, list(_trades(turns, limits_ms)), parts)


def _trades(turns: Sequence[Sequence[Speed]], limits_ms: Sequence[float]) -> Iterator[Trade]:
    """Yields the cost of each limit on slices, as a mean over all turns.

    A turn contains the speed of complete micro-batches, followed by the speed with each of
    `limits_ms`.
    """
    for index, limit_ms in enumerate(limits_ms, start=1):
        kept = statistics.mean(turn[index].nonces_per_s / turn[0].nonces_per_s for turn in turns)
        last = turns[-1][index]
        yield Trade(
            limit_ms,
            Speed(
                n=last.n,
                nonces_per_s=statistics.mean(turn[index].nonces_per_s for turn in turns),
                n_slices=last.n_slices,
                chat_waits_ms=max(turn[index].chat_waits_ms for turn in turns),
            ),
            1 - kept,
        )
