"""An offer to a new host: all that the host's workers need, without secrets.

The host's password is derived from its token and the offer's salt, so the offer alone does not
reveal the password. The seal depends on the token too, so nobody without it can change the offer.
"""

import hmac
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from poc_core.errors import ProoflineError
from poc_core.joining.tokens import Token

REDIS_PORT = 6379
# Settings of workers that all hosts of a node share. A host's own settings have priority.
SHARED = (
    "POC_CALLBACK_INTERVAL_SEC",
    "POC_CALLBACK_MAX_ARTIFACTS",
    "POC_CALLBACK_MAX_BYTES",
    "POC_CALLBACK_RETENTION_SEC",
    "POC_CHAT_POLICY",
    "POC_ENGINE_HUNG_S",
    "POC_GENERATE_CHUNK_TIMEOUT_SEC",
    "POC_GENERATE_RESULT_TTL_SEC",
    "POC_HONOUR_P_VALUE_THRESHOLD",
    "POC_LOGPROB_TOKENS",
    "POC_MAX_STEP_MS",
    "POC_OUTBOX_MAX_BYTES",
    "POC_RPC_TIMEOUT_MS",
    "POC_TRUSTED_MODELS",
    "POC_VALIDATION",
    "POC_WORKER_TTL_S",
)


class OfferError(ProoflineError):
    """An offer that the operator did not write for this token, or that is unreadable."""


class Offer(BaseModel, frozen=True):
    """The Redis url, the Redis user and the settings that a new host gets from the operator."""

    name: str  # the host's name
    user: str  # the host's user of Redis
    salt: str
    redis_url: str  # without user and password
    redis_ca: str | None = None  # trusted certificates (PEM) for rediss://; None: the system's
    settings: dict[str, str] = {}  # POC_ variables that all processes of a node share

    def url_for(self, token: Token) -> str:
        """Returns the url of Redis with this host's Redis user and the user's password, which is
        computed from `token`.
        """
        parts = urlsplit(self.redis_url)
        netloc = f"{self.user}:{token.password(self.salt)}@{parts.netloc}"
        return parts._replace(netloc=netloc, path=parts.path or "/0").geturl()


class SealedOffer(BaseModel, frozen=True):
    """An offer with its seal, as it is stored in Redis and returned by the API."""

    offer: str  # JSON
    seal: str

    @classmethod
    def of(cls, offer: Offer, token: Token) -> "SealedOffer":
        text = offer.model_dump_json()
        return cls(offer=text, seal=token.seal(text))

    def opened(self, token: Token) -> Offer:
        """Returns the offer. OfferError if the seal does not match, or the offer is unreadable."""
        if not hmac.compare_digest(self.seal.encode(), token.seal(self.offer).encode()):
            raise OfferError(
                "The answer was not written by who made the token: somebody between this host and"
                " Redis changed it. This host ignores the answer. Find out who could change it, and"
                " revoke the token."
            )
        try:
            return Offer.model_validate_json(self.offer)
        except ValidationError:
            raise OfferError(
                "The answer cannot be read: is the operator's Proofline of another version? Invite"
                " and join with the same one."
            ) from None


def place_of(redis_url: str) -> tuple[str, int]:
    """Returns the host and port of a Redis url."""
    parts = urlsplit(redis_url)
    return parts.hostname or "", parts.port or REDIS_PORT
