"""The interface of an engine: a loaded model that runs micro-batches."""

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
    """Sign of an engine's progress, beside whether its processes live."""

    beats: int = 0  # steps told of and calls answered, since the engine's start
    waits: bool = False  # somebody waits for the engine


class Engine(ABC):
    """One loaded model. `tick` is called by one thread at a time."""

    info: ModelInfo
    # The decoder layers of each pipeline stage.
    stages: Sequence[range] = (range(1),)
    # Whether a stage's layers may be run a few at a time.
    sliceable: bool = True
    # Slices that chat may find on the device, one behind the other, when it comes.
    slices_in_flight: int = 1
    # Seconds that a call should take at most, far from where the engine counts as lost.
    longest_call_s: float = math.inf
    # Seconds of one token in one layer, as a self-test has measured them; 0: none has.
    token_layer_s: float = 0.0
    # Paths that the API passes on to the chat server, once it serves (openai_paths.passed_on).
    chat_paths: Sequence[str] = ()
    # How it scores known tokens of chat, once it serves; None: it does not.
    validations: Validations | None = None

    @abstractmethod
    def tick(self, tick: Tick) -> TickResult:
        """Runs one tick. EngineMemoryError: all micro-batches must begin anew, smaller.

        EngineLostError: the engine must be replaced. After any other ProoflineError, too, the
        engine has forgotten all micro-batches.
        """

    def profile(self, spec: ProofSpec, nonces: Sequence[int]) -> list[RankProfile]:
        """Returns one micro-batch's time by kernel for each device; empty if unknown.

        For callers who have the engine for themselves. SpecError: it cannot follow the spec.
        """
        return []

    def begin_work(self) -> None:
        """Hears that the engine takes work from now on."""
        return

    def check(self) -> None:
        """EngineLostError when the engine was lost while idle. From any thread, at any time."""
        return

    def pulse(self) -> Pulse:
        """The engine's progress; asked every few seconds by one thread.

        An engine that cannot tell waits for nothing.
        """
        return Pulse()

    def unfinished_chat(self) -> int:
        """Chat requests that the engine has not finished. From any thread, at any time."""
        return 0

    def serve_chat(self, gate: ChatGate, host: str, secret: str | None = None) -> int | None:
        """Serves OpenAI's API on a free port of `host` behind the gate; None: it has no chat.

        `secret`: what requests must have as GATEWAY_SECRET_HEADER; None: nothing.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Frees the model, its device memory and its processes. May be called twice."""

    def check_spec(self, spec: ProofSpec) -> None:
        """SpecError: the model's limits do not allow what the spec asks for of a nonce."""
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
    """An engine that runs a micro-batch in one go."""

    @abstractmethod
    def compute_batch(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        """One value per nonce; None: no finite state. SpecError: the spec cannot be followed."""

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
