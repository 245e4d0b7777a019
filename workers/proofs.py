"""A worker's proofs: its engine, its chat gate, and the thread that runs proofs in slices."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NoReturn

from pydantic import JsonValue

from poc_core import errors
from poc_core.records import ProofSpec
from poc_core.schemes.contract import contract_of
from workers.chat_gate import ChatGate
from workers.engines import base
from workers.pipeline import Pipeline, plan_of

logger = logging.getLogger(__name__)

# Exit status of a worker whose engine died (EX_SOFTWARE), unlike that of a crash.
ENGINE_LOST_STATUS = 70
# Consecutive failures after which an engine is replaced.
_MOST_FAILURES = 3
# Seconds to wait for chat before checking for cancelled work.
_LOOK_S = 0.1


class Proofs:
    """A thread that runs micro-batches on the engine in slices, if chat allows it. Thread-safe."""

    def __init__(
        self, engine: base.Engine, gate: ChatGate | None = None, max_step_ms: float = 50.0
    ) -> None:
        self.engine = engine
        self._pipeline = Pipeline(engine, plan_of(engine))
        self.admit_chat(gate, max_step_ms)
        self._changed = threading.Condition()
        self._added: list[base.MicroBatch] = []
        self._cancelled: list[base.MicroBatch] = []
        self._slices = 0
        self._failures = 0
        self._last_error: errors.ProoflineError | None = None
        self._is_lost = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="proofs", daemon=True)
        self._thread.start()

    def admit_chat(self, gate: ChatGate | None, max_step_ms: float) -> None:
        """Sets the chat gate; None without chat. No micro-batch may be running. `max_step_ms`:
        longest time that a slice may delay chat.
        """
        self.gate = gate
        self._pipeline.plan = plan_of(self.engine, None if gate is None else max_step_ms)

    @property
    def depth(self) -> int:
        """Returns how many micro-batches must be submitted to keep every stage busy. Without chat,
        a GPU has two in its queue, and a third must be ready when the first ends.
        """
        return len(self.engine.stages) + (self.engine.slices_in_flight if self.gate is None else 1)

    def batch_size(self, spec: ProofSpec) -> int:
        """Returns the best number of nonces for the next micro-batch with this spec."""
        contract = contract_of(spec.scheme)
        most = contract.max_batch(spec, self.engine.info)
        return self._pipeline.plan.batch_size(spec, most, contract.passes(spec).steps > 0)

    def submit(
        self, spec: ProofSpec, nonces: Sequence[int], urgent: bool = False
    ) -> base.MicroBatch:
        """Queues the nonces as one micro-batch. SpecError if the model does not support `spec`."""
        self.engine.check_spec(spec)
        micro_batch = base.MicroBatch(spec, nonces, urgent=urgent)
        micro_batch.future.add_done_callback(self._ended)
        with self._changed:
            self._added.append(micro_batch)
            self._changed.notify_all()
        return micro_batch

    def cancel(self, micro_batch: base.MicroBatch) -> None:
        """Stops launching slices of the micro-batch. Its future never completes."""
        with self._changed:
            self._cancelled.append(micro_batch)
            self._changed.notify_all()

    def chat_allows(self, wait_s: float, urgent: bool = False) -> bool:
        """Waits up to `wait_s` seconds until chat allows a slice. Returns False on timeout."""
        return self.gate is None or self.gate.wait(wait_s, urgent)

    def set_computes_round(self, computes: bool) -> None:
        """Tells the chat gate, if there is one, whether this worker computes for a round."""
        if self.gate is not None:
            self.gate.set_computes_round(computes)

    def chat_stats(self) -> dict[str, int | float]:
        """Returns statistics for the heartbeat: the number of slices, the chat gate's counters, and
        the counters of chat validations.
        """
        counted: dict[str, int | float] = {"slices": self._slices}
        if self.gate is not None:
            counted |= vars(self.gate.stats())
        validations = self.engine.validations
        return counted if validations is None else counted | validations.figures()

    @property
    def is_lost(self) -> bool:
        """Returns whether the engine is lost. Its worker then takes no more work, and ends."""
        if not self._is_lost:
            try:
                self.engine.check()
            except base.EngineLostError:
                self._is_lost = True
        return self._is_lost

    def note(self, error: errors.ProoflineError) -> None:
        """Counts a failure of micro-batches, and marks an engine that must be replaced as lost.
        Must be called before leases are given back, so that this worker does not take them again.
        """
        with self._changed:
            is_new = error is not self._last_error  # one failure may end several micro-batches
            if is_new and not isinstance(error, errors.SpecError):
                self._last_error = error
                self._failures += 1
            if isinstance(error, base.EngineLostError) or self._failures >= _MOST_FAILURES:
                self._is_lost = True

    def judge(self, error: errors.ProoflineError) -> bool:
        """Returns True to retry work that ended with `error`, False if every engine would fail.
        Ends this process if its engine must be replaced, so leases must be given back first.
        """
        self.note(error)
        if isinstance(error, errors.SpecError):
            return False
        if isinstance(error, base.EngineLostError):
            self.exit_without_engine(error)
        if self._failures >= _MOST_FAILURES:
            self.exit_without_engine(
                base.EngineLostError(f"The engine failed {self._failures} times in a row: {error}.")
            )
        logger.warning("a micro-batch failed and is tried again: %s", error)
        return True

    def exit_without_engine(self, error: base.EngineLostError) -> NoReturn:
        """Ends this process, which a supervisor restarts. Other workers compute its batches."""
        self._is_lost = True
        logger.critical(
            "%s This worker exits with status %d; its batches run elsewhere.",
            error,
            ENGINE_LOST_STATUS,
        )
        try:
            self.engine.close()
        finally:
            # Not sys.exit: Celery would catch it in a task's thread and continue without an engine.
            os._exit(ENGINE_LOST_STATUS)

    def stop(self) -> None:
        """Stops launching slices, and waits until the engine can be closed safely."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while self._take_orders():
            try:
                self._step()
            except errors.ProoflineError as error:  # the micro-batches' futures have the error
                logger.error("%s", error)
            except Exception as error:
                logger.exception("proofs cannot be computed")
                self._pipeline.fail(
                    errors.ProoflineError(
                        f"The worker failed: {error!r}. Report this with the worker's log."
                    )
                )

    def _take_orders(self) -> bool:
        """Passes new and cancelled micro-batches to the pipeline. Returns False after `stop`."""
        with self._changed:
            while self._pipeline.is_empty and not (self._added or self._cancelled or self._stopped):
                self._changed.wait()
            for micro_batch in self._added:
                self._pipeline.add(micro_batch)
            for micro_batch in self._cancelled:
                self._pipeline.cancel(micro_batch)
            self._added.clear()
            self._cancelled.clear()
            return not self._stopped

    def _step(self) -> None:
        """Launches a slice on every stage. Fetches values instead if chat forbids slices, or if all
        slices are launched.
        """
        if self._pipeline.is_empty:
            return
        if self._pipeline.is_launched or not self.chat_allows(_LOOK_S, self._pipeline.is_urgent):
            self._pipeline.fetch()
            return
        beside_chat = self.gate is not None and self.gate.chat_waits()
        started = time.monotonic()
        # During chat one slice at a time, so that its time is known before the next slice.
        busy_s = self._pipeline.run(wait=beside_chat)
        self._slices += 1
        if self.gate is not None:
            self.gate.ran(started, busy_s)

    def _ended(self, future: Future[Sequence[JsonValue]]) -> None:
        if future.exception() is None:
            self._failures = 0
