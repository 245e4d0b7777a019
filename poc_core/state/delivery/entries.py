"""Entries: the format of computed nonces in a round's outbox and in the list for /status.

An entry is text, `[nonce,value],[nonce,value],...`: JSON without its outer brackets, so that
entries are joined and parsed at once. In an outbox its number of artifacts precedes it, `n|entry`,
so that Lua counts without parsing (`counted_entry` and `entry_count` in lua/common.lua). A job's
outbox has one entry: the callback's body, counted as 1.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import JsonValue


def pack(pairs: Sequence[tuple[int, JsonValue]]) -> str:
    """Makes one entry of pairs."""
    return json.dumps(pairs, separators=(",", ":"), allow_nan=False)[1:-1]


def packed(
    pairs: Sequence[tuple[int, JsonValue]], most: int, most_bytes: int
) -> Iterator[tuple[int, str]]:
    """Yields counts and entries: of at most `most` pairs, and bytes unless one pair has more."""
    for first in range(0, len(pairs), most):
        part = pairs[first : first + most]
        entry = pack(part)
        if len(entry) <= most_bytes or len(part) == 1:
            yield len(part), entry
        else:
            yield from packed(part, max(1, len(part) // (len(entry) // most_bytes + 1)), most_bytes)


def halves(counted: bytes, is_body: bool) -> tuple[bytes, bytes] | None:
    """Splits an outbox's entry into two, each with its count; None if impossible.

    `is_body`: a job's callback; its artifacts are split, and the first half has the excluded
    nonces.
    """
    entry = without_count(counted)
    if not is_body:
        pairs = unpack([entry])
        middle = len(pairs) // 2
        parts = [
            b"%d|%s" % (len(part), pack(part).encode()) for part in (pairs[:middle], pairs[middle:])
        ]
        return (parts[0], parts[1]) if middle else None
    body: dict[str, Any] = json.loads(entry)
    artifacts = body.get("artifacts") or []
    middle = len(artifacts) // 2
    if not middle:
        return None
    rest = {name: value for name, value in body.items() if name != "excluded_nonces"}
    first, second = (
        body | {"artifacts": artifacts[:middle]},
        rest | {"artifacts": artifacts[middle:]},
    )
    return b"1|" + json.dumps(first).encode(), b"1|" + json.dumps(second).encode()


def unpack(entries: Iterable[bytes]) -> list[tuple[int, Any]]:
    """Returns all entries' pairs."""
    return [(nonce, value) for nonce, value in json.loads(b"[" + b",".join(entries) + b"]")]


def without_count(counted: bytes) -> bytes:
    """Removes an outbox entry's count."""
    return counted.split(b"|", 1)[1]
