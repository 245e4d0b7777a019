"""What an engine is to the rest of Proofline: a loaded model that turns nonces into proof values."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from poc_core.errors import ProoflineError, SpecError
from poc_core.records import ModelInfo, ProofSpec
from workers.chat_gate import ChatGate

__all__ = ["Engine", "EngineLostError", "ModelInfo"]


class EngineLostError(ProoflineError):
    """The engine cannot be used any more; its process must exit so that its supervisor starts another."""


class Engine(ABC):
    """One loaded model. `compute` is called by one thread at a time."""

    info: ModelInfo
    # Seconds that the last `compute` kept the engine from other work. Less than what the caller waited where the engine
    # had chat to finish first.
    busy_s: float = 0.0

    @abstractmethod
    def compute(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        """One value per nonce, in order; None for a nonce that the model gave no finite state for.

        Splits into micro-batches itself. SpecError: this model cannot follow the spec. EngineLostError: see
        there.
        """

    def check(self) -> None:
        """EngineLostError when the engine was lost while it had nothing to do. From any thread, at any time."""
        return

    def serve_chat(self, gate: ChatGate, host: str) -> int | None:
        """Serves OpenAI's API on a free port of `host`, every request through the gate. None: it has no chat."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Frees the model, its device memory and its processes. May be called twice."""

    def micro_batches(self, spec: ProofSpec, nonces: Sequence[int]) -> Iterator[Sequence[int]]:
        """The nonces in runs of at most max_batch_tokens tokens, but at least one nonce each.

        SpecError, before the first run: the model's limits do not allow the spec's seq_len.
        """
        info = self.info
        if not 1 <= spec.seq_len <= info.max_seq_len:
            raise SpecError(f"seq_len must be from 1 to {info.max_seq_len} for model {info.name}, not {spec.seq_len}.")
        size = info.max_batch(spec.seq_len)
        return (nonces[i : i + size] for i in range(0, len(nonces), size))
