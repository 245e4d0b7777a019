"""Ticks: how an engine is asked to run slices of proof micro-batches, and what it answers."""

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
    """The engine cannot be used any more: its process must exit, for the supervisor to restart."""


class EngineMemoryError(ProoflineError):
    """Too little device memory for a micro-batch; the engine lives and forgot all of them."""


class Slice(NamedTuple):
    """A run of decoder layers [first, end) of one micro-batch: one stage's, in one of its passes.

    Or several passes [step, until) of a model that has no other stage, each through all its layers.
    """

    micro_batch: int  # its id
    first: int
    end: int
    step: int = 0  # see PassOrder
    until: int = 1


# Ids of micro-batches. One that begins again gets a new id: times of an ended one may come late.
_IDS = itertools.count()


@dataclass(eq=False)
class MicroBatch:
    """Nonces that are computed together, on their way from a worker's runner to its engine.

    A micro-batch of more nonces than the engine holds at a time begins in `parts`.
    """

    spec: ProofSpec
    nonces: Sequence[int]
    id: int = -1  # on the engine
    urgent: bool = False  # see ChatGate
    part: int | None = None  # nonces of one forward of all rows; None: all
    # The micro-batch's values, or why there are none; never done if it is cancelled.
    future: Future[Sequence[JsonValue]] = field(default_factory=Future)
    # How far its slices are launched:
    stage: int = 0
    step: int = 0  # the pass that it is in
    slices: deque[Slice] = field(default_factory=deque)  # of its stage, still to be run
    launched: bool = False  # all its slices are; its values are awaited
    parts: Sequence[MicroBatch] = ()

    @cached_property
    def passes(self) -> Passes:
        return contract_of(self.spec.scheme).passes(self.spec)

    @property
    def order(self) -> PassOrder:
        return PassOrder(len(self.nonces), self.part or len(self.nonces), self.passes)

    @property
    def n_tokens(self) -> int:
        """Tokens of the micro-batch's first forward."""
        return min(self.part or len(self.nonces), len(self.nonces)) * self.passes.rows

    def result(self, timeout_s: float) -> Sequence[JsonValue] | None:
        """One value per nonce, in order; None: not within `timeout_s`.

        Raises the engine's error, or SpecError.
        """
        try:
            return self.future.result(timeout_s)
        except TimeoutError:
            return None

    def rewind(self, part: int) -> None:
        """Puts the micro-batch at its begin, for the first time or again."""
        self.id, self.part = next(_IDS), part
        self.stage = self.step = 0
        self.slices.clear()
        self.launched = False

    def divide(self, most: int) -> None:
        """Splits the micro-batch into parts of at most `most` nonces; the last part ends it."""
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
    """One call into the engine: at most one slice on each pipeline stage."""

    begin: Sequence[MicroBatch] = ()  # micro-batches that are new
    slices: Sequence[Slice] = ()
    drop: Sequence[int] = ()  # ids of micro-batches that are given up
    wait: bool = False  # until all that was launched is done
    fetch: int | None = None  # id of a launched micro-batch: until its values are there


@dataclass(frozen=True)
class TickResult:
    """Micro-batches that ended since the tick before, by id."""

    # By id: why the model cannot follow the micro-batch's spec.
    refused: Mapping[int, str] = field(default_factory=dict)
    ran: Sequence[tuple[Slice, float]] = ()  # seconds that each kept its stage from other work
    # One value per nonce; None: no finite state.
    values: Mapping[int, Sequence[JsonValue]] = field(default_factory=dict)
