"""How the server's side tells the engine's side what a request asks for: beside the request, in the
context of the task that answers; then in `SamplingParams.extra_args` (release/extra_args.py).

A client's own entries of these names (`vllm_xargs`) are dropped, whatever path they came by."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from workers.vllm.release.extra_args import KNOWN_TOKENS, LOGPROBS_MODE, NAMES, TOKEN_IDS

# Of SamplingParams: what asks for logprobs.
_LOGPROBS = ("logprobs", "prompt_logprobs", "logprob_token_ids")


@dataclass(frozen=True)
class Told:
    """Options of an HTTP request beyond vLLM's own parameters."""

    ids: bool = False
    mode: str | None = None
    known: list[int] | None = None
    # Whether a grammar can only be this node's own (--tool-strict-level): other nodes have none.
    no_grammar: bool = False

    def extra_args(self, params: Any) -> dict[str, Any] | None:
        """Those of vLLM's SamplingParams, with ours instead of a client's."""
        found = {name: one for name, one in (params.extra_args or {}).items() if name not in NAMES}
        if self.known is not None:
            found[KNOWN_TOKENS] = self.known
        if self.mode is not None:
            found[LOGPROBS_MODE] = self.mode
        if self.ids and any(getattr(params, name, None) is not None for name in _LOGPROBS):
            found[TOKEN_IDS] = 1
        return found or None


# None: the engine is asked by this process itself, which says all in extra_args.
TOLD: ContextVar[Told | None] = ContextVar("told", default=None)
# For whom the gateway asks: a name that tells clients apart, and nothing more.
CLIENT: ContextVar[str] = ContextVar("client", default="")
# What keeps its prompt's cache apart where the request itself says nothing; empty: nothing does.
SALT: ContextVar[str] = ContextVar("salt", default="")
