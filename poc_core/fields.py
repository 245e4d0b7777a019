"""Pydantic types with bounds, for the fields of requests and settings."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, FailFast, Field, Strict
from pydantic_core import PydanticCustomError

# The largest nonce (protocol.md, section 4).
MAX_NONCE = 2**63 - 1
# The largest batch_size of a request. Engines split batches, so larger batches only take longer.
MAX_BATCH_SIZE = 1024
# Most characters of a name, hash or key. The network's names, hashes and keys have less than 130.
_MAX_TEXT = 256
_MAX_URL = 2048


def _distinct(nonces: list[int]) -> list[int]:
    if len(set(nonces)) < len(nonces):
        seen: set[int] = set()
        twice = next(nonce for nonce in nonces if nonce in seen or seen.add(nonce))  # type: ignore[func-returns-value]
        raise PydanticCustomError(
            "duplicate_nonces",
            "Nonce {nonce} is listed twice; list each nonce once",
            {"nonce": twice},
        )
    return nonces


# Characters that end a url's path, also percent-encoded, because a proxy may decode the url.
_ENDS_A_PATH = re.compile(r"[?#]|%(?:3f|23|[01][0-9a-f])", re.IGNORECASE)


def _http_url(url: str | None) -> str | None:
    if not url:  # an empty url means no callback
        return None
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and ("[" not in parts.netloc or ":" in str(parts.hostname))
        # Characters that the HTTP client's url parser may read differently are refused.
        usable = usable and url.isprintable() and not re.search(r"[\s\\]", url)
    except ValueError:  # a bad port or bracket
        usable = False
    if usable and _ENDS_A_PATH.search(url):
        raise PydanticCustomError(
            "url",
            "The url is a base to which a path is added: leave out the query and fragment (?"
            " and #)",
        )
    if not usable:
        raise PydanticCustomError(
            "url", "The url must look like http://host:port/path or https://host/path"
        )
    return url


Text = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)]
Count = Annotated[int, Strict(), Field(le=MAX_NONCE)]
Nonce = Annotated[int, Strict(), Field(ge=0, le=MAX_NONCE)]
Nonces = Annotated[
    list[Nonce],
    FailFast(),
    AfterValidator(_distinct),
    Field(json_schema_extra={"uniqueItems": True}),
]
HttpUrl = Annotated[str | None, Field(max_length=_MAX_URL), AfterValidator(_http_url)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def check_id(name: str, value: int, of: str, count: int) -> None:
    """Raises a validation error unless the field `name` is smaller than the field `of`."""
    if value >= count:
        raise PydanticCustomError(
            "id_beyond_count",
            "{name} must be smaller than {of}, which is {count}",
            {"name": name, "of": of, "count": count},
        )
