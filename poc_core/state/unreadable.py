"""Skips unreadable records in Redis, and logs each of them once."""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def readable(name: str, parse: Callable[[], T]) -> T | None:
    """Returns the result of `parse`; None if `parse` fails. Logs a failure once per `name`."""
    try:
        return parse()
    except MemoryError:
        raise  # no fault of the record
    except Exception as error:
        _say_once(name, type(error).__name__)
        return None


def answers(pipe: Any) -> list[Any]:
    """Executes a pipeline, and returns its results.

    If a key has the wrong type, the result is an exception. Raises all other errors of Redis.
    """
    found: list[Any] = pipe.execute(raise_on_error=False)
    for one in found:
        if isinstance(one, Exception) and "WRONGTYPE" not in str(one):
            raise one
    return found


@lru_cache(maxsize=1000)
def _say_once(name: str, trouble: str) -> None:
    # The error's text is left out: pydantic's quotes the record, which may hold a secret.
    logger.error(
        "%s in Redis cannot be read (%s) and is skipped: correct or delete it", name, trouble
    )
