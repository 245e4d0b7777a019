"""The exceptions of Proofline. The text of each exception is a sentence for the user."""


class ProoflineError(Exception):
    """Base class of Proofline's errors. The text tells the user what to do next."""


class SpecError(ProoflineError):
    """A proof spec that is invalid for the model or the scheme."""


class VectorError(ProoflineError):
    """A `vector_b64` that does not contain k_dim finite float16 numbers."""


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
    """A job is refused, because too many nonces, jobs or callbacks already wait."""


class AnswerTooLargeError(ProoflineError):
    """A job's answer would be larger than POC_MAX_RESULT_BYTES."""


class ForbiddenReceiverError(ProoflineError):
    """A callback url's receiver is not permitted (POC_CALLBACK_ALLOW), or is the node itself."""


class BodyError(ProoflineError):
    """An invalid request body. `loc`: path to the invalid field; `kind`: type of the error."""

    def __init__(self, message: str, loc: tuple[str | int, ...], kind: str) -> None:
        super().__init__(message)
        self.loc = loc
        self.kind = kind


class TooFewValuesError(ProoflineError):
    """A validation has no verdict, because this node could compute too few of the nonces."""


class ClaimsError(ProoflineError):
    """A validation whose claims do not match its nonces."""
