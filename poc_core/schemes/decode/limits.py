"""An engine's limits for decode proofs, which a worker reports in its ModelInfo."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from pydantic import BaseModel

from poc_core import records
from poc_core.errors import BodyError
from poc_core.schemes.decode.options import PICKED, passes_of

_NAME = "decode"
_LITTLE_MEMORY = "There is no memory for the steps of decode proofs (--decode-memory-gb)."
_CODEBOOKS_DIFFER = (
    "The workers of this model have different codebooks: POC_DECODE_CODEBOOK must be the same for"
    " all."
)


class ChainLimits(BaseModel, frozen=True):
    """A model's limits for decode proofs: the typed form of ModelInfo.schemes["decode"]."""

    no_chains: str = ""  # why the model cannot compute decode proofs; empty if it can
    codebook: str = ""  # sha256 of the codebook; empty if the engine computes no decode proofs
    # Positions of decode steps that fit into memory at a time; None for max_batch_tokens.
    kept_tokens: int | None = None
    kept_block: int = 1  # the memory holds a multiple of kept_block positions for each nonce
    # The memory of a nonce's linear attention states, as a number of positions.
    kept_state: int = 0

    @classmethod
    def of(cls, info: records.ModelInfo) -> Self:
        return cls.model_validate(info.schemes.get(_NAME, {}))

    @classmethod
    def common(cls, infos: Sequence[records.ModelInfo]) -> Self:
        """Returns limits that hold for all the models `infos`. They refuse decode proofs if the
        models' codebooks differ, or if one of the models cannot compute decode proofs.
        """
        each = [cls.of(info) for info in infos]
        codebooks = sorted({one.codebook for one in each if one.codebook})
        kept = [one.kept_tokens for one in each if one.kept_tokens is not None]
        why_not = next((one.no_chains for one in each if one.no_chains), "")
        return cls(
            no_chains=why_not or (_CODEBOOKS_DIFFER if len(codebooks) > 1 else ""),
            codebook=codebooks[0] if codebooks else "",
            kept_tokens=min(kept, default=None),
            kept_block=max(one.kept_block for one in each),
            kept_state=max(one.kept_state for one in each),
        )

    def on(self, info: records.ModelInfo) -> records.ModelInfo:
        """Returns a copy of `info` with these limits for decode proofs."""
        return replace(info, schemes={**info.schemes, _NAME: self.model_dump()})

    def with_room(self, n_tokens: int, spec: records.ProofSpec) -> Self:
        """Returns a copy of the limits for a KV cache with room for `n_tokens` positions of decode
        steps. The copy refuses decode proofs if the memory is too small for one nonce of the spec.
        """
        room = self.model_copy(update={"kept_tokens": n_tokens})
        return room.refused("" if room.keeps(spec) else _LITTLE_MEMORY)

    def refused(self, why: str) -> Self:
        """Returns a copy that refuses decode proofs for the reason `why`; "" to allow them."""
        return self.model_copy(update={"no_chains": why})

    def keeps(self, spec: records.ProofSpec) -> bool:
        """Returns True if the memory holds the decode steps of one nonce of the spec."""
        return self.kept_tokens is None or self.step_positions(spec) <= self.kept_tokens

    def step_positions(self, spec: records.ProofSpec) -> int:
        """Returns how many positions in memory one nonce's decode steps take; 0 without steps."""
        passes = passes_of(spec)
        if not passes.steps:
            return 0
        return -(-passes.positions // self.kept_block) * self.kept_block + self.kept_state

    def max_batch(self, spec: records.ProofSpec, info: records.ModelInfo) -> int:
        """Returns the largest number of nonces in a micro-batch. Its prefill may run in parts."""
        by_nonce = self.step_positions(spec)
        if not by_nonce:
            return info.max_batch(passes_of(spec).rows)
        room = self.kept_tokens or info.max_batch_tokens
        return max(1, min(room // by_nonce, info.max_batch(rows=1)))


def why_no_chains(info: records.ModelInfo) -> str:
    """Returns a sentence that says why a model cannot compute decode proofs; "" if it can."""
    if info.hidden_size < PICKED:
        return f"Decode proofs need a hidden size of {PICKED}; this model's is {info.hidden_size}."
    return ChainLimits.of(info).no_chains


def refusal(spec: records.ProofSpec, info: records.ModelInfo) -> BodyError | None:
    """Returns an error that says why a model cannot compute this decode proof; None if it can."""
    passes, limits = passes_of(spec), ChainLimits.of(info)
    n_tokens = passes.positions
    if why_not := why_no_chains(info):
        return BodyError(why_not, ("params", "decode"), "no_decode")
    if n_tokens > info.max_seq_len:
        return _too_long(
            "max_tokens",
            f"seq_len and max_tokens are {n_tokens} together; the model takes {info.max_seq_len}",
        )
    if passes.rows > info.max_batch_tokens >= spec.seq_len:
        return _too_long(
            "seq_len",
            f"A nonce takes {passes.rows} tokens of one forward; the model takes"
            f" {info.max_batch_tokens}",
        )
    if not limits.keeps(spec):
        return _too_long(
            "max_tokens",
            f"seq_len and max_tokens are {n_tokens} together; there is memory for"
            f" {max(0, (limits.kept_tokens or 0) - limits.kept_state)} (--decode-memory-gb)",
        )
    return None


def _too_long(field: str, message: str) -> BodyError:
    return BodyError(message, ("params", field), "too_long")
