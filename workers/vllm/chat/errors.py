"""What is wrong with a validation of chat, in words for whoever asked. The server's side reads
this too, so no vLLM here."""

from __future__ import annotations

from poc_core.errors import ProoflineError


class CannotForce(ProoflineError):
    """This node cannot put the known tokens in, whatever they are: 503, which judges nobody."""

    def __init__(self, reason: str) -> None:
        """`reason`: a clause that goes on from "known tokens cannot be scored here: "."""
        super().__init__(f"Known tokens cannot be scored here: {reason}.")
        self.reason = reason
