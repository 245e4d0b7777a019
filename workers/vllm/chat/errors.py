"""Errors that refuse chat requests, with texts for the client. Imports no vLLM."""

from collections.abc import Iterable
from contextvars import ContextVar

from poc_core.errors import ProoflineError


class Refused(ProoflineError):
    """A refusal of a request, with its HTTP status. Its creation is recorded (see `refusals`), so
    that the client gets this status. For an exception vLLM may send 500, 400 or a stream event.
    """

    status: int
    retry_after_s: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param`: the name of the invalid request field."""
        super().__init__(message)
        self.param = param
        noted = _NOTED.get()
        if noted is not None:
            noted.append(self)


class CannotForce(Refused):
    """503: this node cannot score known tokens. The network does not blame the tokens' creator."""

    status = 503

    def __init__(self, reason: str) -> None:
        """`reason`: a clause that continues "known tokens cannot be scored here: "."""
        super().__init__(f"Known tokens cannot be scored here: {reason}.")


class Unavailable(Refused):
    """503: this node cannot answer now. The client should try again later."""

    status, retry_after_s = 503, 30  # rounds last minutes


class Failed(Refused):
    """500: an unexpected error."""

    status = 500


class BadRequest(Refused):
    """400: bad request. For `param` "enforced_tokens", the network blames the tokens' creator."""

    status = 400


_NOTED: ContextVar[list[Refused] | None] = ContextVar("refusals", default=None)


def refusals() -> list[Refused]:
    """Starts recording this asyncio task's Refused errors. Returns the list that will hold them."""
    found: list[Refused] = []
    _NOTED.set(found)
    return found


def refuse_foreign(param: str, ids: Iterable[int], n_ids: int) -> None:
    """Raises BadRequest for a token id outside 0 to `n_ids` - 1, which would end the engine."""
    for one in ids:
        if not 0 <= one < n_ids:
            raise BadRequest(
                f"{param} has the token id {one}; this model has 0 to {n_ids - 1}.", param
            )
