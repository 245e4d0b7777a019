"""Passes Proofline's own options of a request from the HTTP server to the engine: in a context
variable, then in `SamplingParams.extra_args` (release/extra_args.py). Entries with the same names
in a client's `vllm_xargs` are dropped on every path.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from workers.vllm.release import extra_args

# Fields of SamplingParams that request logprobs.
_LOGPROBS = ("logprobs", "prompt_logprobs", "logprob_token_ids")


@dataclass(frozen=True)
class RequestOptions:
    """Proofline's options of an HTTP request, for which vLLM has no parameters."""

    ids: bool = False
    mode: str | None = None
    known: list[int] | None = None
    # True: drops a grammar, which only this node's --tool-strict-level can have added.
    no_grammar: bool = False

    def extra_args(self, params: Any) -> dict[str, Any] | None:
        """Returns vLLM's extra_args: these options, and the client's entries with other names."""
        found = {
            name: one
            for name, one in (params.extra_args or {}).items()
            if name not in extra_args.NAMES
        }
        if self.known is not None:
            found[extra_args.KNOWN_TOKENS] = self.known
        if self.mode is not None:
            found[extra_args.LOGPROBS_MODE] = self.mode
        if self.ids and any(getattr(params, name, None) is not None for name in _LOGPROBS):
            found[extra_args.TOKEN_IDS] = 1
        return found or None


# None: this process itself sends the request, with all options in extra_args.
TOLD: ContextVar[RequestOptions | None] = ContextVar("told", default=None)
# The client of the request: a name from the gateway that distinguishes clients, and nothing more.
CLIENT: ContextVar[str] = ContextVar("client", default="")
# Salt of the prefix cache for a request without its own salt; empty if there is none.
SALT: ContextVar[str] = ContextVar("salt", default="")
