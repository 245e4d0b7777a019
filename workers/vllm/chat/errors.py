"""Why a request for chat is refused, in words for whoever asked. The server's side reads this too,
so no vLLM here."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

from poc_core.errors import ProoflineError


class Refused(ProoflineError):
    """Answered with this status.

    vLLM's server makes of exceptions what its release does: 500, 400, an event of a stream. So each
    is noted with the request that it is made for, see `refusals`.
    """

    status: int
    retry_after_s: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param`: the field that is wrong."""
        super().__init__(message)
        self.param = param
        noted = _NOTED.get()
        if noted is not None:
            noted.append(self)


class CannotForce(Refused):
    """This node cannot put the known tokens in, whatever they are: 503, which judges nobody."""

    status = 503

    def __init__(self, reason: str) -> None:
        """`reason`: a clause that goes on from "known tokens cannot be scored here: "."""
        super().__init__(f"Known tokens cannot be scored here: {reason}.")
        self.reason = reason


class Unavailable(Refused):
    """503: this node cannot answer yet."""

    status, retry_after_s = 503, 30


class Failed(Refused):
    """500: what nobody foresaw."""

    status = 500


class BadRequest(Refused):
    """400: no node could answer. With `param` "enforced_tokens" it judges who gave the tokens."""

    status = 400


_NOTED: ContextVar[list[Refused] | None] = ContextVar("refusals", default=None)


def refusals() -> list[Refused]:
    """Those of the request that this task answers, from now on."""
    found: list[Refused] = []
    _NOTED.set(found)
    return found


def refuse_foreign(param: str, ids: Iterable[int], n_ids: int) -> None:
    """BadRequest: one of the token ids is outside a vocabulary of `n_ids`. An engine would index
    its logits or embeddings with that, and die."""
    for one in ids:
        if not 0 <= one < n_ids:
            raise BadRequest(
                f"{param} has the token id {one}; this model has 0 to {n_ids - 1}.", param
            )
