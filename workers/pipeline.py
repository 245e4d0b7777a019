"""Moves micro-batches through an engine's pipeline stages. Each call of the engine, a tick, runs at
most one slice (a few decoder layers) per stage.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from poc_core import errors
from poc_core.records import ProofSpec
from poc_core.schemes.contract import contract_of
from workers.engines import base
from workers.slice_plan import SlicePlan

logger = logging.getLogger(__name__)


class Pipeline:
    """A queue of micro-batches for one engine, which are run in slices. Not thread-safe."""

    def __init__(self, engine: base.Engine, plan: SlicePlan) -> None:
        self._engine = engine
        self.plan = plan
        self._waiting: deque[base.MicroBatch] = deque()
        self._going: dict[int, base.MicroBatch] = {}  # started on the engine, oldest first
        # ended micro-batches whose slice times may still arrive
        self._measured: dict[int, base.MicroBatch] = {}
        self._drop: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._going and not self._drop

    @property
    def is_launched(self) -> bool:
        """Returns True if all slices of all micro-batches are launched; values may be missing."""
        return not self._waiting and all(one.launched for one in self._going.values())

    @property
    def is_urgent(self) -> bool:
        """Returns whether an urgent micro-batch still has slices to launch."""
        going = (one for one in self._going.values() if not one.launched)
        return any(one.urgent for one in (*self._waiting, *going))

    def add(self, micro_batch: base.MicroBatch) -> None:
        """Queues a micro-batch. An urgent micro-batch goes before all that are not urgent."""
        waiting = self._waiting
        n_before = sum(one.urgent for one in waiting) if micro_batch.urgent else len(waiting)
        waiting.insert(n_before, micro_batch)

    def cancel(self, micro_batch: base.MicroBatch) -> None:
        """Removes a micro-batch and its parts. No more of their slices are launched."""
        for part in micro_batch.parts:
            self.cancel(part)
        if self._going.pop(micro_batch.id, None) is not None:
            self._drop.append(micro_batch.id)
        elif micro_batch in self._waiting:
            self._waiting.remove(micro_batch)

    def fetch(self) -> None:
        """Waits for the values of the oldest launched micro-batch. Drops all cancelled ones."""
        first = next((one.id for one in self._going.values() if one.launched), None)
        if self._drop or first is not None:
            drop, self._drop = self._drop, []
            self._call(base.Tick(drop=drop, fetch=first))

    def run(self, wait: bool) -> float:
        """Launches the next slice on each stage. Returns the device seconds per stage of the slices
        that ended since the last call. `wait`: True to wait for all launched slices. If memory runs
        out, smaller micro-batches start again; any other error ends all of them and is raised.
        """
        begin: list[base.MicroBatch] = []
        slices: list[base.Slice] = []
        busy: set[int] = set()  # stages
        for micro_batch in [*self._going.values()]:
            if not micro_batch.launched:
                slices += self._next_slice(micro_batch, busy)
                busy.add(micro_batch.stage)
        if self._waiting and 0 not in busy and self._has_place():
            micro_batch = self._next_waiting()
            micro_batch.rewind(self._part(micro_batch))
            self._going[micro_batch.id] = micro_batch
            self._measured[micro_batch.id] = micro_batch
            begin.append(micro_batch)
            slices += self._next_slice(micro_batch, busy)
        drop, self._drop = self._drop, []
        for one in slices:
            self._move_on(self._going[one.micro_batch], one)
        return self._call(base.Tick(begin, slices, drop, wait))

    def _call(self, tick: base.Tick) -> float:
        try:
            return self._take(self._engine.tick(tick))
        except base.EngineMemoryError as error:
            self._begin_anew(error)
            return 0.0
        except errors.ProoflineError as error:
            self.fail(error)
            raise

    def fail(self, error: errors.ProoflineError) -> None:
        """Ends all micro-batches with the error, including those that wait to start."""
        ended = [*self._forget_going(), *self._waiting]
        self._waiting.clear()
        for micro_batch in ended:
            micro_batch.future.set_exception(error)

    def _next_waiting(self) -> base.MicroBatch:
        micro_batch = self._waiting.popleft()
        contract = contract_of(micro_batch.spec.scheme)
        most = contract.max_batch(micro_batch.spec, self._engine.info)
        if len(micro_batch.nonces) <= most:
            return micro_batch
        micro_batch.divide(most)
        self._waiting.extendleft(reversed(micro_batch.parts))
        return self._waiting.popleft()

    def _next_slice(self, micro_batch: base.MicroBatch, busy: set[int]) -> list[base.Slice]:
        """Returns a list with the micro-batch's next slice. The list is empty if another slice in
        this tick uses the same stage.
        """
        if micro_batch.stage in busy:
            return []
        if not micro_batch.slices:
            micro_batch.slices.extend(self._cut(micro_batch))
        return [micro_batch.slices.popleft()]

    def _cut(self, micro_batch: base.MicroBatch) -> list[base.Slice]:
        """Cuts the micro-batch's current pass into slices of its current stage. If the engine has
        only one stage, a slice can contain several passes.
        """
        engine, order, first = self._engine, micro_batch.order, micro_batch.step
        stage, n = engine.stages[micro_batch.stage], len(order.members(first))
        measured = stage if engine.sliceable else range(1)
        if order.is_step(first):
            cut, n_passes = self.plan.cut_steps(micro_batch.spec, n, measured)
        else:
            cut, n_passes = self.plan.cut(micro_batch.spec, n, measured), 1
        if not engine.sliceable:
            cut = [stage]
        until = min(first + n_passes, order.n_passes) if len(engine.stages) == 1 else first + 1
        return [
            base.Slice(micro_batch.id, layers.start, layers.stop, first, until) for layers in cut
        ]

    def _move_on(self, micro_batch: base.MicroBatch, ran: base.Slice) -> None:
        """Moves the micro-batch to its next stage or pass if `ran` was the stage's last slice."""
        if micro_batch.slices:
            return
        if ran.end != self._engine.stages[-1].stop:
            micro_batch.stage += 1
        elif ran.until < micro_batch.order.n_passes:
            micro_batch.stage, micro_batch.step = 0, ran.until
        else:
            micro_batch.launched = True

    def _part(self, micro_batch: base.MicroBatch) -> int:
        """Returns how many nonces the first forward pass (over all rows) computes at a time."""
        n, passes = len(micro_batch.nonces), micro_batch.passes
        most = self.plan.batch_size(micro_batch.spec, self._engine.info.max_batch(passes.rows))
        return min(most, n) if passes.steps else n

    def _has_place(self) -> bool:
        """Returns True if the next waiting micro-batch can start. The KV caches for decode steps
        suffice for one micro-batch per stage.
        """
        going = [one for one in self._going.values() if not one.launched]
        return len(going) < len(self._engine.stages) or not any(
            one.passes.steps for one in [*going, self._waiting[0]]
        )

    def _take(self, result: base.TickResult) -> float:
        for micro_batch_id, why in result.refused.items():
            if (micro_batch := self._going.pop(int(micro_batch_id), None)) is not None:
                micro_batch.future.set_exception(errors.SpecError(why))
        for micro_batch_id, values in result.values.items():
            if (micro_batch := self._going.pop(int(micro_batch_id), None)) is not None:
                micro_batch.future.set_result(values)
        busy_s = 0.0
        for one, seconds in result.ran:
            busy_s += seconds / len(self._engine.stages)
            if (micro_batch := self._measured.get(one.micro_batch)) is not None:
                # A stage that cannot be cut counts as one layer, because chat waits for all of it.
                layers = one.end - one.first if self._engine.sliceable else 1
                layers, order = layers * (one.until - one.step), micro_batch.order
                n, are_steps = len(order.members(one.step)), order.is_step(one.step)
                self.plan.ran(micro_batch.spec, n, layers, seconds, are_steps)
        oldest = min(self._going, default=max(self._measured, default=0))
        self._measured = {
            key: kept
            for key, kept in self._measured.items()
            if key >= oldest - len(self._engine.stages)
        }
        return busy_s

    def _begin_anew(self, error: base.EngineMemoryError) -> None:
        """Halves the maximum size after a lack of memory, and restarts the micro-batches in
        progress. If the largest micro-batch has only one nonce, that micro-batch fails instead.
        """
        going = self._forget_going()
        largest = max(going, key=lambda one: one.n_tokens)
        if len(largest.nonces) == 1:
            going.remove(largest)
            self._waiting.extendleft(reversed(going))
            largest.future.set_exception(error)
            return
        self._waiting.extendleft(reversed(going))
        spec, order = largest.spec, largest.order
        self._engine.info = contract_of(spec.scheme).halved(
            spec, order.n, order.part, self._engine.info
        )
        logger.warning(
            "the device has too little memory for %d tokens at a time; from now on micro-batches"
            " hold %d: %s",
            largest.n_tokens,
            self._engine.info.max_batch_tokens,
            error,
        )

    def _forget_going(self) -> list[base.MicroBatch]:
        """Removes and returns the micro-batches in progress. The next tick tells the engine to drop
        them.
        """
        going = [*self._going.values()]
        self._drop = [one.id for one in going]
        self._going.clear()
        self._measured.clear()
        return going


def plan_of(engine: base.Engine, max_step_ms: float | None = None) -> SlicePlan:
    """Creates the engine's slice plan. `max_step_ms`: longest time that a slice may delay chat;
    None without chat.
    """
    return SlicePlan(
        max_step_ms, engine.slices_in_flight, engine.longest_call_s, engine.token_layer_s
    )


def compute_all(
    engine: base.Engine, spec: ProofSpec, nonces: Sequence[int], plan: SlicePlan | None = None
) -> list[Any]:
    """Returns one value per nonce in order; None if its hidden state is not finite. The engine must
    be idle. `plan`: None to limit only the length of a call. SpecError if the model lacks the spec.
    """
    engine.check_spec(spec)
    if not nonces:
        return []
    plan = plan or plan_of(engine)
    pipeline, whole = Pipeline(engine, plan), base.MicroBatch(spec, nonces)
    contract = contract_of(spec.scheme)
    most, has_steps = contract.max_batch(spec, engine.info), whole.passes.steps > 0
    whole.divide(plan.batch_size(spec, most, has_steps))
    for part in whole.parts:
        pipeline.add(part)
    while not whole.future.done():
        if pipeline.is_launched:
            pipeline.fetch()
        else:
            pipeline.run(wait=False)
    return list(whole.future.result())
