"""The interface of engines: loaded models that run micro-batches."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import JsonValue

from poc_core.errors import SpecError
from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes import contract_of
from workers.engines.ticks import Slice, Tick, TickResult

if TYPE_CHECKING:
    from workers.chat_gate import ChatGate
    from workers.engines.rank_profile import RankProfile
    from workers.engines.validations import Validations


@dataclass(frozen=True)
class Pulse:
    """An engine's progress. Shows whether the engine hangs even though its processes live."""

    beats: int = 0  # reported steps and answered calls since the engine's start
    waits: bool = False  # a request or call is waiting for the engine


class Engine(ABC):
    """A loaded model for proofs and perhaps chat. Only one thread at a time may call `tick`."""

    info: ModelInfo
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
        """Runs one tick. After any ProoflineError, the engine has dropped all micro-batches. The
        caller must restart them with fewer nonces (EngineMemoryError), or replace the engine
        (EngineLostError).
        """

    def profile(self, spec: ProofSpec, nonces: Sequence[int]) -> list[RankProfile]:
        """Measures one micro-batch. Returns its time by kernel for each device; empty if the engine
        cannot measure it. The engine must be idle. SpecError if the engine cannot compute the spec.
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
        """Serves OpenAI's API behind the chat gate on a free port of `host`. Returns the port, or
        None if the engine has no chat. `secret`: the value that the header GATEWAY_SECRET_HEADER of
        each request must have; None if none is required.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Frees the model and its device memory, and ends the engine's processes. May be called
        twice.
        """

    def check_spec(self, spec: ProofSpec) -> None:
        """Raises SpecError if the model cannot compute the spec, e.g. because of its seq_len."""
        info, contract = self.info, contract_of(spec.scheme)
        passes = contract.passes(spec)
        most = min(info.max_seq_len, info.max_batch_tokens)
        if not 1 <= spec.seq_len <= most:
            raise SpecError(
                f"seq_len must be from 1 to {most} for model {info.name}, not {spec.seq_len}."
            )
        if passes.rows > most or passes.positions > info.max_seq_len:
            raise SpecError(
                f"A nonce has {passes.positions} positions; the model {info.name} takes {most}."
            )
        if refusal := contract.why_not(spec, info):
            raise SpecError(f"{refusal.removesuffix('.')}.")


class WholeBatchEngine(Engine):
    """An engine that runs each micro-batch in one call."""

    @abstractmethod
    def compute_batch(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        """Returns one value per nonce, which is None if the nonce has no finite hidden state.
        SpecError if the model does not support the spec.
        """

    def tick(self, tick: Tick) -> TickResult:
        refused: dict[int, str] = {}
        values: dict[int, Sequence[JsonValue]] = {}
        ran: list[tuple[Slice, float]] = []
        for one in tick.begin:
            began = time.monotonic()
            try:
                values[one.id] = self.compute_batch(one.spec, one.nonces)
            except SpecError as error:
                refused[one.id] = str(error)
            else:
                ran.append((Slice(one.id, 0, 1), time.monotonic() - began))
        return TickResult(refused, ran, values)
