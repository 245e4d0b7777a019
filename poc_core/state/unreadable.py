"""Records in Redis that cannot be read: skipped, so that the others are read, and logged once."""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def readable(name: str, parse: Callable[[], T]) -> T | None:
    """What `parse` makes of the record `name`; None where it fails, logged once a name."""
    try:
        return parse()
    except MemoryError:
        raise  # no fault of the record
    except Exception as error:
        _say_once(name, type(error).__name__)
        return None


def answers(pipe: Any) -> list[Any]:
    """A pipeline's answers. A key of another type gives an error in its place, for `readable`.

    RedisError: of any other kind.
    """
    found: list[Any] = pipe.execute(raise_on_error=False)
    for one in found:
        if isinstance(one, Exception) and "WRONGTYPE" not in str(one):
            raise one
    return found


@lru_cache(maxsize=1000)
def _say_once(name: str, trouble: str) -> None:
    # Not the error's text: that of pydantic quotes the record, which may hold a secret.
    logger.error(
        "%s in Redis cannot be read (%s) and is skipped: correct or delete it", name, trouble
    )
