"""Which workers computed how much of a job or round, for as long as its record is kept."""

from typing import Any

from redis import Redis

_PREFIX = b"by:"  # of the record's fields that scripts count in, before the worker's name


def shares(redis: Redis, key: str) -> dict[str, int]:
    """Nonces by the worker's name. `key`: of the record. A nonce that came twice counts once."""
    # A job's hash may hold an answer of megabytes: its other fields are not read.
    connection: Any = redis
    fields = sorted(field for field in connection.hkeys(key) if field.startswith(_PREFIX))
    counts = connection.hmget(key, fields) if fields else []
    found = zip(fields, counts, strict=True)
    return {field.removeprefix(_PREFIX).decode(): int(n) for field, n in found if n is not None}
