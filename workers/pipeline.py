"""Micro-batches on their way through an engine's pipeline stages, one slice of each stage a tick.

With one stage that is simply one slice after the other. With several, a micro-batch enters the
first stage as soon as the one before it has left it, so that no stage waits for another while there
is work.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import JsonValue

from poc_core.errors import ProoflineError, SpecError
from poc_core.records import Passes, PassOrder, ProofSpec
from poc_core.schemes import contract_of
from workers.engines.base import Engine
from workers.engines.ticks import (
    Begin,
    EngineMemoryError,
    Slice,
    Tick,
    TickResult,
)
from workers.slice_plan import SlicePlan

logger = logging.getLogger(__name__)

OnEnd = Callable[[Sequence[JsonValue] | None, ProoflineError | None], None]
"""Takes the values of a micro-batch's nonces, or why there are none."""


@dataclass(eq=False)
class Flight:
    """A micro-batch, or more nonces than the engine holds at a time: then it begins in parts."""

    spec: ProofSpec
    nonces: Sequence[int]
    on_end: OnEnd  # called once
    id: int = -1  # on the engine; anew each time it begins
    stage: int = 0
    part: int = 0  # nonces of one forward of all rows
    step: int = 0  # of its passes, the one that it is in
    slices: deque[Slice] = field(default_factory=deque)  # of its stage, still to be run
    launched: bool = False  # all its slices are; its values are awaited
    parts: Sequence[Flight] = ()

    @cached_property
    def passes(self) -> Passes:
        return contract_of(self.spec.scheme).passes(self.spec)

    @property
    def order(self) -> PassOrder:
        return PassOrder(len(self.nonces), self.part, self.passes)

    def rewind(self, new_id: int, part: int) -> None:
        """It begins, for the first time or again."""
        self.id, self.part = new_id, part
        self.stage = self.step = 0
        self.slices.clear()
        self.launched = False


class Pipeline:
    """Forms ticks and takes their results. Not for several threads."""

    def __init__(self, engine: Engine, plan: SlicePlan) -> None:
        self._engine = engine
        self.plan = plan
        self._ids = engine.flight_ids
        self._waiting: deque[Flight] = deque()
        self._flying: dict[int, Flight] = {}  # begun on the engine, oldest first
        self._measured: dict[int, Flight] = {}  # those whose times may still come
        self._drop: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._flying and not self._drop

    @property
    def is_launched(self) -> bool:
        """Whether nothing is to be launched, and only values are awaited."""
        return not self._waiting and all(flight.launched for flight in self._flying.values())

    def add(self, flight: Flight) -> None:
        self._waiting.append(flight)

    def cancel(self, flight: Flight) -> None:
        """Forgets it; nothing is launched for it any more."""
        for part in flight.parts:
            self.cancel(part)
        if self._flying.pop(flight.id, None) is not None:
            self._drop.append(flight.id)
        elif flight in self._waiting:
            self._waiting.remove(flight)

    def fetch(self) -> None:
        """Waits for the first of those micro-batches that are launched, if there is any, and
        takes its values.
        """
        first = next((flight.id for flight in self._flying.values() if flight.launched), None)
        if self._drop or first is not None:
            drop, self._drop = self._drop, []
            self._call(Tick(drop=drop, fetch=first))

    def run(self, wait: bool) -> float:
        """One tick: launches the next slice of every stage. Returns the seconds of device time that
        it heard of.

        `wait`: until all that was launched is done. The engine's errors pass through, after the
        flights were told of those that are the end of them.
        """
        begin: list[Flight] = []
        slices: list[Slice] = []
        busy: set[int] = set()  # stages
        for flight in [*self._flying.values()]:
            if not flight.launched:
                slices += self._next_slice(flight, busy)
                busy.add(flight.stage)
        if self._waiting and 0 not in busy and self._has_place():
            flight = self._next_waiting()
            flight.rewind(next(self._ids), self._part(flight))
            self._flying[flight.id] = flight
            self._measured[flight.id] = flight
            begin.append(flight)
            slices += self._next_slice(flight, busy)
        drop, self._drop = self._drop, []
        started = [
            Begin(flight.id, flight.spec, list(flight.nonces), flight.part) for flight in begin
        ]
        for one in slices:
            self._move_on(self._flying[one.flight], one)
        return self._call(Tick(started, slices, drop, wait))

    def _call(self, tick: Tick) -> float:
        try:
            return self._take(self._engine.tick(tick))
        except EngineMemoryError as error:
            self._begin_anew(error)
            return 0.0
        except ProoflineError as error:
            self.fail(error)
            raise

    def fail(self, error: ProoflineError) -> None:
        """Ends all flights, waiting ones too."""
        flights = [*self._forget_flying(), *self._waiting]
        self._waiting.clear()
        for flight in flights:
            flight.on_end(None, error)

    def _next_waiting(self) -> Flight:
        flight = self._waiting.popleft()
        most = contract_of(flight.spec.scheme).max_batch(flight.spec, self._engine.info)
        if len(flight.nonces) <= most:
            return flight
        flight.parts = _parts(flight, most)
        self._waiting.extendleft(reversed(flight.parts))
        return self._waiting.popleft()

    def _next_slice(self, flight: Flight, busy: set[int]) -> list[Slice]:
        """Its next slice, unless another micro-batch has its stage in this tick."""
        if flight.stage in busy:
            return []
        if not flight.slices:
            flight.slices.extend(self._cut(flight))
        return [flight.slices.popleft()]

    def _cut(self, flight: Flight) -> list[Slice]:
        """What its stage runs of the pass that it is in, or of several passes where there is no
        other stage.
        """
        stage, order, first = self._engine.stages[flight.stage], flight.order, flight.step
        n, measured = len(order.members(first)), stage if self._engine.sliceable else range(1)
        if order.is_step(first):
            cut, n_passes = self.plan.cut_steps(flight.spec, n, measured)
        else:
            cut, n_passes = self.plan.cut(flight.spec, n, measured), 1
        if not self._engine.sliceable:
            cut = [stage]
        until = (
            min(first + n_passes, order.n_passes) if len(self._engine.stages) == 1 else first + 1
        )
        return [Slice(flight.id, layers.start, layers.stop, first, until) for layers in cut]

    def _move_on(self, flight: Flight, ran: Slice) -> None:
        """To the next stage or pass, where the slice was the last one of its stage."""
        if flight.slices:
            return
        if ran.end != self._engine.stages[-1].stop:
            flight.stage += 1
        elif ran.until < flight.order.n_passes:
            flight.stage, flight.step = 0, ran.until
        else:
            flight.launched = True

    def _part(self, flight: Flight) -> int:
        """Nonces of one forward of all rows: all of them, where it goes on without steps."""
        most = self.plan.batch_size(flight.spec, self._engine.info.max_batch(flight.passes.rows))
        return min(most, len(flight.nonces)) if flight.passes.steps else len(flight.nonces)

    def _has_place(self) -> bool:
        """Whether another micro-batch may begin: what a stage keeps for the steps of some is
        for one each.
        """
        going = [flight for flight in self._flying.values() if not flight.launched]
        return len(going) < len(self._engine.stages) or not any(
            f.passes.steps for f in [*going, self._waiting[0]]
        )

    def _take(self, result: TickResult) -> float:
        for flight_id, why in result.refused.items():
            if (flight := self._flying.pop(int(flight_id), None)) is not None:
                flight.on_end(None, SpecError(why))
        for flight_id, values in result.values.items():
            if (flight := self._flying.pop(int(flight_id), None)) is not None:
                flight.on_end(values, None)
        busy_s = 0.0
        for one, seconds in result.ran:
            busy_s += seconds / len(self._engine.stages)
            if one.flight in self._measured:
                flight = self._measured[one.flight]
                # A stage that cannot be cut is as one layer to the plan: it is what chat waits for.
                layers = one.end - one.first if self._engine.sliceable else 1
                n, are_steps = len(flight.order.members(one.step)), flight.order.is_step(one.step)
                self.plan.ran(flight.spec, n, layers * (one.until - one.step), seconds, are_steps)
        oldest = min(self._flying, default=max(self._measured, default=0))
        self._measured = {
            key: kept
            for key, kept in self._measured.items()
            if key >= oldest - len(self._engine.stages)
        }
        return busy_s

    def _begin_anew(self, error: EngineMemoryError) -> None:
        """The engine has forgotten its micro-batches: they begin again, of half the size from
        now on. A single nonce that does not fit has no smaller size: it ends.
        """
        flights = self._forget_flying()
        largest = max(flights, key=_n_tokens)
        if len(largest.nonces) == 1:
            flights.remove(largest)
            self._waiting.extendleft(reversed(flights))
            largest.on_end(None, error)
            return
        self._waiting.extendleft(reversed(flights))
        spec, n = largest.spec, len(largest.nonces)
        part = min(largest.part or n, n)
        self._engine.info = contract_of(spec.scheme).halved(spec, n, part, self._engine.info)
        logger.warning(
            "the device has too little memory for %d tokens at a time; from now on micro-batches"
            " hold %d: %s",
            _n_tokens(largest),
            self._engine.info.max_batch_tokens,
            error,
        )

    def _forget_flying(self) -> list[Flight]:
        """After an error: the engine's process that met it has forgotten all flights; the
        others are told to.
        """
        flights = [*self._flying.values()]
        self._drop = [flight.id for flight in flights]
        self._flying.clear()
        self._measured.clear()
        return flights


def _n_tokens(flight: Flight) -> int:
    return min(flight.part or len(flight.nonces), len(flight.nonces)) * flight.passes.rows


def _parts(flight: Flight, most: int) -> list[Flight]:
    """Flights of at most `most` nonces that together are this one."""
    runs = [flight.nonces[first : first + most] for first in range(0, len(flight.nonces), most)]
    found: dict[int, Sequence[JsonValue]] = {}
    errors: list[ProoflineError | None] = []

    def end_of(index: int) -> OnEnd:
        def end(values: Sequence[JsonValue] | None, error: ProoflineError | None) -> None:
            if values is not None:
                found[index] = values
                if len(found) == len(runs):
                    flight.on_end([value for i in range(len(runs)) for value in found[i]], None)
            elif not errors:  # the others may end so too
                errors.append(error)
                flight.on_end(None, error)

        return end

    return [Flight(flight.spec, run, end_of(index)) for index, run in enumerate(runs)]


def compute_all(
    engine: Engine, spec: ProofSpec, nonces: Sequence[int], plan: SlicePlan | None = None
) -> list[Any]:
    """One value per nonce, in order; None for a nonce that the model gave no finite state for.

    For callers who have the engine for themselves. `plan`: how micro-batches are cut; None: not
    at all. SpecError: this model cannot follow the spec.
    """
    engine.check_spec(spec)
    if not nonces:
        return []
    found: list[Any] = []

    def keep(values: Sequence[JsonValue] | None, error: ProoflineError | None) -> None:
        if error is not None:
            raise error
        found.extend(values or ())

    pipeline = Pipeline(engine, plan or SlicePlan(None, 1))
    pipeline.add(Flight(spec, nonces, keep))
    while not pipeline.is_empty:
        if pipeline.is_launched:
            pipeline.fetch()
        else:
            pipeline.run(wait=False)
    return found
