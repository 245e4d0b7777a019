"""The exceptions of Proofline. Each text is a sentence for the user."""


class ProoflineError(Exception):
    """Base class of Proofline's errors. The text tells the user what to do next."""


class SpecError(ProoflineError):
    """A proof spec that is invalid for the model or the scheme."""


class VectorError(ProoflineError):
    """A `vector_b64` that is not k_dim finite float16 numbers."""


class SettingsError(ProoflineError):
    """Invalid POC_ environment variables. The text names each variable and its valid values."""


class OptionsError(ProoflineError):
    """Options of an engine that contradict each other."""


class ArgumentsError(ProoflineError):
    """Arguments of `vllm serve` that a deployment must not contain."""


class DeployedError(ProoflineError):
    """A model is already deployed, and is running or starting."""


class NoHostError(ProoflineError):
    """No host is available that could run the deployment."""


class RoundError(ProoflineError):
    """The round's state does not allow the request. The text names the missing step."""


class QueueFullError(ProoflineError):
    """Too many nonces, jobs (POC_MAX_QUEUED_NONCES) or callbacks (POC_OUTBOX_MAX_BYTES) wait."""


class AnswerTooLargeError(ProoflineError):
    """A job's answer would be larger than POC_MAX_RESULT_BYTES."""


class ForbiddenReceiverError(ProoflineError):
    """A callback url with a destination that POC_CALLBACK_ALLOW does not allow."""


class BodyError(ProoflineError):
    """An invalid request body. `loc`: path to the invalid field; `kind`: type of the error."""

    def __init__(self, message: str, loc: tuple[str | int, ...], kind: str) -> None:
        super().__init__(message)
        self.loc = loc
        self.kind = kind


class TooFewValuesError(ProoflineError):
    """This node could compute too few nonces of a validation for a verdict."""


class ClaimsError(ProoflineError):
    """A validation whose claims do not match its nonces."""
