"""Entries: the format of computed nonces in a round's outbox, and in the list for /status.

An entry is a text such as `[nonce,value],[nonce,value]`: JSON without the outer brackets, so that
several entries can be joined and parsed at once. In an outbox, an entry is prefixed with its number
of pairs, `n|entry`, so that Lua need not parse the entry (`counted_entry` and `entry_count` in
lua/common.lua). A job's outbox has one entry, the callback's body, prefixed with 1.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import JsonValue


def pack(pairs: Sequence[tuple[int, JsonValue]]) -> str:
    """Returns (nonce, value) pairs as one entry."""
    return json.dumps(pairs, separators=(",", ":"), allow_nan=False)[1:-1]


def packed(
    pairs: Sequence[tuple[int, JsonValue]], most: int, most_bytes: int
) -> Iterator[tuple[int, str]]:
    """Packs (nonce, value) pairs into entries of at most `most` pairs. Yields (number of pairs,
    entry). `most_bytes`: most bytes of an entry with several pairs.
    """
    for first in range(0, len(pairs), most):
        part = pairs[first : first + most]
        entry = pack(part)
        if len(entry) <= most_bytes or len(part) == 1:
            yield len(part), entry
        else:
            yield from packed(part, max(1, len(part) // (len(entry) // most_bytes + 1)), most_bytes)


def halves(counted: bytes, is_body: bool) -> tuple[bytes, bytes] | None:
    """Splits an outbox's entry (`n|entry`) into two such entries; None if the entry cannot be
    split. `is_body`: True if the entry is the body of a job's callback. The first half then lists
    all excluded nonces.
    """
    entry = without_count(counted)
    body: dict[str, Any] = json.loads(entry) if is_body else {}
    parts = body.get("artifacts") or [] if is_body else unpack([entry])
    middle = len(parts) // 2
    if not middle:
        return None
    low, high = parts[:middle], parts[middle:]
    if not is_body:
        return _counted(len(low), pack(low)), _counted(len(high), pack(high))
    first = json.dumps(body | {"artifacts": low})
    body.pop("excluded_nonces", None)
    return _counted(1, first), _counted(1, json.dumps(body | {"artifacts": high}))


def _counted(n: int, entry: str) -> bytes:
    return f"{n}|{entry}".encode()


def unpack(entries: Iterable[bytes]) -> list[tuple[int, Any]]:
    """Returns the (nonce, value) pairs of all entries, in order."""
    return [(nonce, value) for nonce, value in json.loads(b"[" + b",".join(entries) + b"]")]


def without_count(counted: bytes) -> bytes:
    """Returns an outbox's entry without the prefix `n|`."""
    return counted.split(b"|", 1)[1]
