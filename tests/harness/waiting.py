"""Waiting for what processes and threads do, however slow the machine is."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    what: str = "it happened",
    timeout_s: float = 180,
    pause_s: float = 0.05,
) -> float:
    """Seconds until `condition` held; AssertionError naming `what` after `timeout_s`.

    Looks each `pause_s`, at first more often.
    """
    began, pause = time.monotonic(), 0.005
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(pause)
        pause = min(pause_s, 1.2 * pause)
    return time.monotonic() - began
