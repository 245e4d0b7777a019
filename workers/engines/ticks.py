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
    """The engine cannot be used any more; its process must exit so that its supervisor starts
    another.
    """


class EngineMemoryError(ProoflineError):
    """The device had too little memory for a micro-batch; the engine lives, and has forgotten
    all micro-batches.
    """


class Slice(NamedTuple):
    """A run of decoder layers [first, end) of one micro-batch, all of one pipeline stage, in one of
    its passes.

    Or several passes [step, until) of a model that has no other stage, each through all its layers.
    """

    micro_batch: int  # its id
    first: int
    end: int
    step: int = 0  # see PassOrder
    until: int = 1


# Every micro-batch has an id of its own each time that it begins: times of one that ended may come
# with the next one's.
_IDS = itertools.count()


@dataclass(eq=False)
class MicroBatch:
    """Nonces that are computed together, on their way from a worker's runner to its engine.

    There may be more than the engine holds at a time: then they begin in `parts`.
    """

    spec: ProofSpec
    nonces: Sequence[int]
    id: int = -1  # on the engine
    part: int | None = None  # nonces of one forward of all rows; None: all
    # Its values, or why there are none; never done if the micro-batch is cancelled.
    future: Future[Sequence[JsonValue]] = field(default_factory=Future)
    # How far its slices are launched:
    stage: int = 0
    step: int = 0  # of its passes, the one that it is in
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
        """Of its first forward."""
        return min(self.part or len(self.nonces), len(self.nonces)) * self.passes.rows

    def result(self, timeout_s: float) -> Sequence[JsonValue] | None:
        """One value per nonce, in order; None: not within `timeout_s`. The engine's error, or
        SpecError.
        """
        try:
            return self.future.result(timeout_s)
        except TimeoutError:
            return None

    def rewind(self, part: int) -> None:
        """It begins, for the first time or again."""
        self.id, self.part = next(_IDS), part
        self.stage = self.step = 0
        self.slices.clear()
        self.launched = False

    def divide(self, most: int) -> None:
        """Into parts of at most `most` nonces, with the last of which it ends."""
        firsts = range(0, len(self.nonces), most)
        self.parts = [MicroBatch(self.spec, self.nonces[first : first + most]) for first in firsts]
        for one in self.parts:
            one.future.add_done_callback(self._part_ended)

    def _part_ended(self, part: Future[Sequence[JsonValue]]) -> None:
        if self.future.done():  # of another part's error
            return
        if error := part.exception():
            self.future.set_exception(error)
        elif all(one.future.done() for one in self.parts):
            self.future.set_result([value for one in self.parts for value in one.future.result()])


@dataclass(frozen=True)
class Tick:
    """What one call into the engine does: at most one slice on each pipeline stage."""

    begin: Sequence[MicroBatch] = ()  # micro-batches that are new
    slices: Sequence[Slice] = ()
    drop: Sequence[int] = ()  # ids of micro-batches that are given up
    wait: bool = False  # until all that was launched is done
    fetch: int | None = None  # the id of one of which all is launched: until its values are there


@dataclass(frozen=True)
class TickResult:
    """What ended since the tick before, of whichever tick; micro-batches by their ids."""

    refused: Mapping[int, str] = field(
        default_factory=dict
    )  # micro-batches whose spec the model cannot follow: why
    ran: Sequence[tuple[Slice, float]] = ()  # seconds that each kept its stage from other work
    values: Mapping[int, Sequence[JsonValue]] = field(
        default_factory=dict
    )  # one per nonce; None: no finite state
