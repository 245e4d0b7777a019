"""Ticks: the calls that run slices of proof micro-batches on an engine, and their results."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pydantic import JsonValue

from poc_core.errors import ProoflineError
from poc_core.records import Passes, PassOrder, ProofSpec
from poc_core.schemes import contract_of


class EngineLostError(ProoflineError):
    """The engine is unusable. Its process must exit, so that the supervisor restarts it."""


class EngineMemoryError(ProoflineError):
    """A micro-batch ran out of device memory. The engine lives, but dropped all micro-batches."""


class Slice(NamedTuple):
    """A piece of a micro-batch: decoder layers [first, end) of one pipeline stage, for one pass.
    With a single stage, a slice can also be several passes [step, until) through all layers.
    """

    micro_batch: int  # the micro-batch's id
    first: int
    end: int
    step: int = 0  # see PassOrder
    until: int = 1


# Ids of micro-batches; a new one for each restart, because times of the old one may come late.
_IDS = itertools.count()


@dataclass(eq=False)
class MicroBatch:
    """Nonces that an engine computes together, or, if they are too many, as several `parts`."""

    spec: ProofSpec
    nonces: Sequence[int]
    id: int = -1  # id on the engine
    urgent: bool = False  # see ChatGate
    part: int | None = None  # nonces of one forward of all rows; None for all nonces
    # The micro-batch's values or error. Never completes if the micro-batch is cancelled.
    future: Future[Sequence[JsonValue]] = field(default_factory=Future)
    # The progress of launching slices:
    stage: int = 0
    step: int = 0  # the current pass
    slices: deque[Slice] = field(default_factory=deque)  # slices of this stage still to run
    launched: bool = False  # True when all slices are launched and only the values are missing
    parts: Sequence[MicroBatch] = ()

    @cached_property
    def passes(self) -> Passes:
        return contract_of(self.spec.scheme).passes(self.spec)

    @property
    def order(self) -> PassOrder:
        return PassOrder(len(self.nonces), self.part or len(self.nonces), self.passes)

    @property
    def n_tokens(self) -> int:
        """The number of tokens in the micro-batch's first forward pass."""
        return min(self.part or len(self.nonces), len(self.nonces)) * self.passes.rows

    def result(self, timeout_s: float) -> Sequence[JsonValue] | None:
        """Returns one value per nonce, or None after `timeout_s`. Raises the engine's error."""
        try:
            return self.future.result(timeout_s)
        except TimeoutError:
            return None

    def rewind(self, part: int) -> None:
        """Resets the micro-batch to its beginning, with a new id. `part`: see the field."""
        self.id, self.part = next(_IDS), part
        self.stage = self.step = 0
        self.slices.clear()
        self.launched = False

    def divide(self, most: int) -> None:
        """Divides the micro-batch into parts of at most `most` nonces. Their values complete
        `future`.
        """
        firsts = range(0, len(self.nonces), most)
        self.parts = [
            MicroBatch(self.spec, self.nonces[first : first + most], urgent=self.urgent)
            for first in firsts
        ]
        for one in self.parts:
            one.future.add_done_callback(self._part_ended)

    def _part_ended(self, part: Future[Sequence[JsonValue]]) -> None:
        if self.future.done():  # by another part's error
            return
        if error := part.exception():
            self.future.set_exception(error)
        elif all(one.future.done() for one in self.parts):
            self.future.set_result([value for one in self.parts for value in one.future.result()])


@dataclass(frozen=True)
class Tick:
    """One call to the engine, with at most one slice for each pipeline stage."""

    begin: Sequence[MicroBatch] = ()  # new micro-batches
    slices: Sequence[Slice] = ()
    drop: Sequence[int] = ()  # ids of cancelled micro-batches
    wait: bool = False  # True: returns when all launched slices are done
    fetch: int | None = None  # id of a launched micro-batch: returns when its values are available


@dataclass(frozen=True)
class TickResult:
    """An engine's results since the previous tick, by the ids of the micro-batches."""

    # By id: why the model cannot compute the micro-batch's spec.
    refused: Mapping[int, str] = field(default_factory=dict)
    ran: Sequence[tuple[Slice, float]] = ()  # seconds that each slice occupied its stage
    # One value per nonce; None for a nonce without finite state.
    values: Mapping[int, Sequence[JsonValue]] = field(default_factory=dict)
