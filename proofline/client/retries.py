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
    """The retries of one call, which end `patience_s` seconds after the creation of this object."""

    def __init__(self, patience_s: float) -> None:
        self._ends_at = time.monotonic() + patience_s
        self._tries = 0

    def pause_s(self, error: ApiError, is_repeatable: bool, waits_for_start: bool) -> float:
        """Returns the seconds until the call is retried. Raises `error` if it must not be retried.

        `is_repeatable`: see Call. `waits_for_start`: True to retry if nothing listens at the
        address, because the node is possibly restarting. False if the address is possibly wrong.
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
        return max(error.retry_after_s, FIRST_PAUSE_S)
    is_safe = is_repeatable and error.status in (None, *PERHAPS_AWAY)
    if not (is_safe if error.was_sent else waits_for_start):
        return None
    longest = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, _MOST_DOUBLINGS))
    return random.uniform(0.5, 1) * longest  # so that clients do not all retry at the same time


def retry_after_s(header: str | None) -> float | None:
    """Converts a Retry-After header, a number or an HTTP date, to seconds; None for other text."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
