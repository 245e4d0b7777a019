"""Nonces per worker of a job or round, as long as its record is stored."""

from typing import Any

from redis import Redis

_PREFIX = b"by:"  # of the record's count fields, before the worker's name


def shares(redis: Redis, key: str) -> dict[str, int]:
    """Returns nonces by worker name. `key`: of the record. A repeated nonce counts once."""
    # Other fields of a job's hash are not read: the answer may take megabytes.
    connection: Any = redis
    fields = sorted(field for field in connection.hkeys(key) if field.startswith(_PREFIX))
    counts = connection.hmget(key, fields) if fields else []
    found = zip(fields, counts, strict=True)
    return {field.removeprefix(_PREFIX).decode(): int(n) for field, n in found if n is not None}
