"""Ticks: how an engine is asked to run slices of proof micro-batches, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import JsonValue

from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec


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

    flight: int  # the micro-batch
    first: int
    end: int
    step: int = 0  # see PassOrder
    until: int = 1


class Begin(NamedTuple):
    """A micro-batch that is new."""

    flight: int
    spec: ProofSpec
    nonces: Sequence[int]
    part: int | None = None  # nonces of one forward of all rows; None: all


@dataclass(frozen=True)
class Tick:
    """What one call into the engine does: at most one slice on each pipeline stage."""

    begin: Sequence[Begin] = ()  # micro-batches that are new
    slices: Sequence[Slice] = ()
    drop: Sequence[int] = ()  # micro-batches that are given up
    wait: bool = False  # until all that was launched is done
    fetch: int | None = None  # a micro-batch of which all is launched: until its values are there


@dataclass(frozen=True)
class TickResult:
    """What ended since the tick before, of whichever tick."""

    refused: Mapping[int, str] = field(
        default_factory=dict
    )  # micro-batches whose spec the model cannot follow: why
    ran: Sequence[tuple[Slice, float]] = ()  # seconds that each kept its stage from other work
    values: Mapping[int, Sequence[JsonValue]] = field(
        default_factory=dict
    )  # one per nonce; None: no finite state
