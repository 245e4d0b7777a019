"""Entries: how computed nonces wait in a round's outbox, and in what /status lists of it.

An entry is text, `[nonce,value],[nonce,value],...`: JSON without its outer brackets, so that
entries are joined and parsed in one go. In an outbox its number of artifacts comes before it,
`n|entry`, so that Lua counts without parsing (`counted_entry` and `entry_count` in lua/common.lua).
The one entry of a job's outbox is the body of its callback, counted as 1.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import JsonValue


def pack(pairs: Sequence[tuple[int, JsonValue]]) -> str:
    """The pairs as one entry."""
    return json.dumps(pairs, separators=(",", ":"), allow_nan=False)[1:-1]


def packed(
    pairs: Sequence[tuple[int, JsonValue]], most: int, most_bytes: int
) -> Iterator[tuple[int, str]]:
    """Entries with their counts: of at most `most` pairs, and bytes unless one pair has more."""
    for first in range(0, len(pairs), most):
        part = pairs[first : first + most]
        entry = pack(part)
        if len(entry) <= most_bytes or len(part) == 1:
            yield len(part), entry
        else:
            yield from packed(part, max(1, len(part) // (len(entry) // most_bytes + 1)), most_bytes)


def halves(counted: bytes, is_body: bool) -> tuple[bytes, bytes] | None:
    """An entry of an outbox as two, each with its count; None when it cannot be divided.

    `is_body`: a job's callback: its artifacts are divided; excluded nonces stay in the first half.
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
    """The pairs of all entries, in order."""
    return [(nonce, value) for nonce, value in json.loads(b"[" + b",".join(entries) + b"]")]


def without_count(counted: bytes) -> bytes:
    """An entry of an outbox without its count."""
    return counted.split(b"|", 1)[1]
