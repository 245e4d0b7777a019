"""The token with which a host joins, and what is derived from it.

The token itself goes from the operator to the host and nowhere else. The API sees `id` alone, Redis
a hash of that; whoever has either learns neither the token nor the host's password.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

from poc_core.errors import ProoflineError

# So that scanners find a token that was published by mistake.
PREFIX = "proofline_"
_RANDOM_BYTES = 32
_FORM = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")


class TokenError(ProoflineError):
    """The text is no token of `proofline hosts invite`."""


@dataclass(frozen=True)
class Token:
    """256 random bits, as text."""

    text: str = field(repr=False)

    @classmethod
    def new(cls) -> "Token":
        return cls(PREFIX + secrets.token_urlsafe(_RANDOM_BYTES))

    @classmethod
    def read(cls, text: str) -> "Token":
        """The token in a text. TokenError: there is none, which says nothing of the text."""
        if not _FORM.fullmatch(text.strip()):
            raise TokenError(
                "The token is none of `proofline hosts invite`: those have 53 characters and begin"
                f" with {PREFIX}; copy it whole."
            )
        return cls(text.strip())

    @property
    def id(self) -> str:
        """The id that the host shows the API, 64 hexadecimal digits."""
        return self._derived("id")

    def password(self, salt: str) -> str:
        """The host's password of Redis, 64 hexadecimal digits; useless without either."""
        return self._derived(f"password {salt}")

    def seal(self, text: str) -> str:
        """Returns a seal, which proves that the operator wrote the text for this token."""
        return self._derived(f"seal {text}")

    def _derived(self, purpose: str) -> str:
        message = f"proofline host 1 {purpose}".encode()
        return hmac.digest(self.text.encode(), message, hashlib.sha256).hex()


def hashed(secret: str) -> str:
    """SHA-256 of an id or password, as Redis has it."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_salt() -> str:
    return secrets.token_hex(_RANDOM_BYTES)
