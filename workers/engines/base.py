"""The interface of engines (loaded models), and ticks: calls that run slices of micro-batches."""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pydantic import JsonValue

from poc_core import errors, records
from poc_core.schemes.contract import contract_of
from workers.chat_gate import ChatGate
from workers.engines.validations import Validations


@dataclass(frozen=True)
class Kernel:
    """The time of a GPU kernel or a CPU operation."""

    # The step of a micro-batch: inputs, reflections, tail or norms; empty for other work.
    step: str
    name: str
    seconds: float  # total of all runs


@dataclass(frozen=True)
class RankProfile:
    """The times of one micro-batch, without division into slices, on one device or CPU process."""

    device: str
    first_layer: int  # the rank's first layer, equal for all ranks of a pipeline stage
    seconds: float  # time of the fastest of a few runs, most of them without a profiler
    busy_s: float  # time with a running kernel, in the run with the profiler
    flops: float  # floating-point operations of matrix products and attention
    peak_flops: float  # operations per second of a large matrix product in the engine's dtype
    kernels: list[Kernel] = field(default_factory=list)  # from the run with the profiler


class EngineLostError(errors.ProoflineError):
    """The engine is unusable. Its process must exit, so that the supervisor restarts it."""


class EngineMemoryError(errors.ProoflineError):
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


# Ids of micro-batches. A restart gets a new id, because times with the old id may arrive late.
_IDS = itertools.count()


@dataclass(eq=False)
class MicroBatch:
    """Nonces that an engine computes together. If they are too many, `parts` divides them."""

    spec: records.ProofSpec
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
    def passes(self) -> records.Passes:
        return contract_of(self.spec.scheme).passes(self.spec)

    @property
    def order(self) -> records.PassOrder:
        return records.PassOrder(len(self.nonces), self.part or len(self.nonces), self.passes)

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
        """Resets the micro-batch to its beginning, with a new id and a new value of `part`."""
        self.id, self.part = next(_IDS), part
        self.stage = self.step = 0
        self.slices.clear()
        self.launched = False

    def divide(self, most: int) -> None:
        """Divides the nonces into parts of at most `most` nonces. When all parts have values, the
        `future` of this micro-batch gets all the values.
        """
        firsts = range(0, len(self.nonces), most)
        self.parts = [
            MicroBatch(self.spec, self.nonces[first : first + most], urgent=self.urgent)
            for first in firsts
        ]
        for one in self.parts:
            one.future.add_done_callback(self._part_ended)

    def _part_ended(self, part: Future[Sequence[JsonValue]]) -> None:
        if self.future.done():  # another part has failed
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
    wait: bool = False  # True: waits until all launched slices are done
    fetch: int | None = None  # id of a launched micro-batch: waits for its values


@dataclass(frozen=True)
class TickResult:
    """The results of an engine since the previous tick, by micro-batch id."""

    # By id: why the model cannot compute the micro-batch's spec.
    refused: Mapping[int, str] = field(default_factory=dict)
    ran: Sequence[tuple[Slice, float]] = ()  # seconds that each slice occupied its stage
    # One value per nonce; None for a nonce without finite state.
    values: Mapping[int, Sequence[JsonValue]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pulse:
    """An engine's progress. Shows whether the engine hangs even though its processes live."""

    beats: int = 0  # reported steps and answered calls since the engine's start
    waits: bool = False  # a request or call is waiting for the engine


class Engine(ABC):
    """A loaded model for proofs and perhaps chat. Only one thread at a time may call `tick`."""

    info: records.ModelInfo
    # The decoder layers of each pipeline stage.
    stages: Sequence[range] = (range(1),)
    # True: a stage's layers may be run a few at a time.
    sliceable: bool = True
    # Slices that may be queued on the device when a chat request arrives.
    slices_in_flight: int = 1
    # Most seconds that a call should take, far less than the limit after which an engine is lost.
    longest_call_s: float = math.inf
    # Seconds per token and layer, measured by a self-test; 0 if not measured.
    token_layer_s: float = 0.0
    # Paths that the API forwards to the chat server, once it serves (openai_paths.passed_on).
    chat_paths: Sequence[str] = ()
    # How known tokens of chat are scored, once chat is served; None if they are not.
    validations: Validations | None = None

    @abstractmethod
    def tick(self, tick: Tick) -> TickResult:
        """Runs one tick. After a ProoflineError all micro-batches are dropped. The caller must
        restart them with fewer nonces (EngineMemoryError), or replace the engine (EngineLostError).
        """

    def profile(self, spec: records.ProofSpec, nonces: Sequence[int]) -> list[RankProfile]:
        """Measures one micro-batch. Returns a profile for each device; empty if the engine cannot
        measure. The engine must be idle. SpecError if the engine cannot compute the spec.
        """
        return []

    def begin_work(self) -> None:
        """Prepares the engine for its first work. Called once, when the worker is ready."""
        return

    def check(self) -> None:
        """Raises EngineLostError if the engine was lost while idle. Any thread may call it."""
        return

    def pulse(self) -> Pulse:
        """Returns the engine's progress. One thread calls it every few seconds."""
        return Pulse()

    def unfinished_chat(self) -> int:
        """Returns the number of unfinished chat requests. Any thread may call it."""
        return 0

    def serve_chat(self, gate: ChatGate, host: str, secret: str | None = None) -> int | None:
        """Serves OpenAI's API behind the gate on a free port of `host`. Returns the port; None
        without chat. `secret`: required value of GATEWAY_SECRET_HEADER; None if not required.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Frees the model and ends the engine's processes. May be called twice."""

    def check_spec(self, spec: records.ProofSpec) -> None:
        """Raises SpecError if the model cannot compute the spec, e.g. because of its seq_len."""
        info, contract = self.info, contract_of(spec.scheme)
        passes = contract.passes(spec)
        most = min(info.max_seq_len, info.max_batch_tokens)
        if not 1 <= spec.seq_len <= most:
            raise errors.SpecError(
                f"seq_len must be from 1 to {most} for model {info.name}, not {spec.seq_len}."
            )
        if passes.rows > most or passes.positions > info.max_seq_len:
            raise errors.SpecError(
                f"A nonce has {passes.positions} positions; the model {info.name} takes {most}."
            )
        if refusal := contract.why_not(spec, info):
            raise errors.SpecError(f"{refusal.removesuffix('.')}.")


class WholeBatchEngine(Engine):
    """An engine that runs each micro-batch in one call."""

    @abstractmethod
    def compute_batch(self, spec: records.ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        """Returns one value per nonce; None without a finite hidden state. Can raise SpecError."""

    def tick(self, tick: Tick) -> TickResult:
        refused: dict[int, str] = {}
        values: dict[int, Sequence[JsonValue]] = {}
        ran: list[tuple[Slice, float]] = []
        for one in tick.begin:
            began = time.monotonic()
            try:
                values[one.id] = self.compute_batch(one.spec, one.nonces)
            except errors.SpecError as error:
                refused[one.id] = str(error)
            else:
                ran.append((Slice(one.id, 0, 1), time.monotonic() - began))
        return TickResult(refused, ran, values)
