"""Decides whether and when a request is retried."""

import random
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from proofline.client.errors import ApiError

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 8.0
ASKED_TO_WAIT = (429, 503)  # with Retry-After: refused before anything was done
PERHAPS_AWAY = (502, 503, 504)  # from a proxy while the node restarts
# Larger exponents have no effect, and would cause an OverflowError.
_MOST_DOUBLINGS = 10


class Patience:
    """The retries of one call, which end `patience_s` seconds from now."""

    def __init__(self, patience_s: float) -> None:
        self._ends_at = time.monotonic() + patience_s
        self._tries = 0

    def pause_s(self, error: ApiError, is_repeatable: bool, waits_for_start: bool) -> float:
        """Returns the seconds until the next try, or raises `error` if there is none.

        `waits_for_start`: True to retry if nobody listens at the address, as when a node restarts;
        False if the address may be wrong.
        """
        pause_s = _pause_s(error, is_repeatable, waits_for_start, self._tries)
        if pause_s is None or time.monotonic() + pause_s > self._ends_at:
            raise error
        self._tries += 1
        return pause_s


def _pause_s(
    error: ApiError, is_repeatable: bool, waits_for_start: bool, tries: int
) -> float | None:
    if error.retry_after_s is not None and error.status in ASKED_TO_WAIT:
        return error.retry_after_s
    if not error.was_sent:
        again = waits_for_start
    else:
        again = is_repeatable and (error.status is None or error.status in PERHAPS_AWAY)
    # Random, so that the clients of a node do not all retry at the same time.
    return (
        random.uniform(0.5, 1) * min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(tries, _MOST_DOUBLINGS))
        if again
        else None
    )


def retry_after_s(header: str | None) -> float | None:
    """Parses Retry-After into seconds (a number or an HTTP date, RFC 9110, 10.2.3).

    Returns None for other texts.
    """
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
