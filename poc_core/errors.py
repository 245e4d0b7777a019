"""The exceptions of Proofline, each with one sentence for its user."""


class ProoflineError(Exception):
    """Base of the errors that Proofline raises on purpose; the text says what to do next."""


class SpecError(ProoflineError):
    """A proof spec that the model or the scheme cannot follow."""


class VectorError(ProoflineError):
    """A `vector_b64` that is not k_dim finite float16 numbers."""


class SettingsError(ProoflineError):
    """POC_ environment variables that cannot be used; the text names each and what it may be."""


class OptionsError(ProoflineError):
    """Options of an engine that do not go together."""


class ArgumentsError(ProoflineError):
    """Arguments of `vllm serve` that a deployment may not bring."""


class DeployedError(ProoflineError):
    """A model is deployed already, and runs or starts."""


class NoHostError(ProoflineError):
    """No host is here that could run what is deployed."""


class RoundError(ProoflineError):
    """A round cannot do that now; the text says which step is missing."""


class QueueFullError(ProoflineError):
    """Too many nonces or jobs (POC_MAX_QUEUED_NONCES) or callbacks (POC_OUTBOX_MAX_BYTES) wait."""


class AnswerTooLargeError(ProoflineError):
    """A job's answer would have more than POC_MAX_RESULT_BYTES."""


class ForbiddenReceiverError(ProoflineError):
    """A callback url that leads where no callback may go (POC_CALLBACK_ALLOW)."""


class BodyError(ProoflineError):
    """A request's body that cannot be followed. `loc`: path to the fault; `kind`: its name."""

    def __init__(self, message: str, loc: tuple[str | int, ...], kind: str) -> None:
        super().__init__(message)
        self.loc = loc
        self.kind = kind


class TooFewValuesError(ProoflineError):
    """So many nonces of a validation could not be computed here that the others say too little."""


class ClaimsError(ProoflineError):
    """A validation whose claims are not those of its nonces."""
