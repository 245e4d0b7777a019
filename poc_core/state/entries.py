"""How computed nonces wait in Redis: a round's outbox and what /status lists of it are lists of entries.

An entry is text, `[nonce,value],[nonce,value],...`: JSON without its outer brackets, so that entries are joined and
parsed in one go. In an outbox each has its number of artifacts before it, `n|entry`, by which Lua counts what it
takes without parsing it (`counted_entry` and `entry_count` in lua/common.lua). The one entry of a job's outbox is the
body of its callback, counted as 1.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import JsonValue


def pack(pairs: Sequence[tuple[int, JsonValue]]) -> str:
    """One entry."""
    return json.dumps(pairs, separators=(",", ":"), allow_nan=False)[1:-1]


def unpack(entries: Iterable[bytes]) -> list[tuple[int, Any]]:
    """The pairs of all entries, in order."""
    return [(nonce, value) for nonce, value in json.loads(b"[" + b",".join(entries) + b"]")]


def without_count(counted: bytes) -> bytes:
    """The entry of an outbox."""
    return counted.split(b"|", 1)[1]
