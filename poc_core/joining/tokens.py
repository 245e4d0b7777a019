"""The token with which a host joins, and the values that are derived from the token.

Only the operator and the host know the token. The API gets only the token's `id`, and Redis stores
a hash of the id. Neither the id nor the hash reveals the token or the host's password.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

from poc_core.errors import ProoflineError

# A fixed prefix lets scanners find a token that was published by mistake.
PREFIX = "proofline_"
_RANDOM_BYTES = 32
_FORM = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")


class TokenError(ProoflineError):
    """The text is not a token of `proofline hosts invite`."""


@dataclass(frozen=True)
class Token:
    """A token: 256 random bits as text."""

    text: str = field(repr=False)

    @classmethod
    def new(cls) -> "Token":
        return cls(PREFIX + secrets.token_urlsafe(_RANDOM_BYTES))

    @classmethod
    def read(cls, text: str) -> "Token":
        """Parses a token. TokenError if the text is no token; the error does not quote the text."""
        if not _FORM.fullmatch(text.strip()):
            raise TokenError(
                "The token is none of `proofline hosts invite`: those have 53 characters and begin"
                f" with {PREFIX}; copy it whole."
            )
        return cls(text.strip())

    @property
    def id(self) -> str:
        """The token's id, which the host sends to the API: 64 hexadecimal digits."""
        return self._derived("id")

    def password(self, salt: str) -> str:
        """Returns the host's Redis password: 64 hexadecimal digits. `salt`: from the offer."""
        return self._derived(f"password {salt}")

    def seal(self, text: str) -> str:
        """Returns the seal (HMAC) of a text. It proves that the text's author knows this token."""
        return self._derived(f"seal {text}")

    def _derived(self, purpose: str) -> str:
        message = f"proofline host 1 {purpose}".encode()
        return hmac.digest(self.text.encode(), message, hashlib.sha256).hex()


def hashed(secret: str) -> str:
    """Returns the SHA-256 of an id or password in hexadecimal, as Redis stores it."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_salt() -> str:
    return secrets.token_hex(_RANDOM_BYTES)
