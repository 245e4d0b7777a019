"""The node's history for the console's charts: values for each completed time step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poc_core.state.past.history import (
    CHAT_MS,
    CHATS,
    FAILED,
    SHOWN,
    History,
    first_token_p95,
)

# Seconds after a step's end until all its data has been reported (Services.reporting).
LATE_S = 1.5


def shown(history: History, step_s: int, now: float, n: int = SHOWN) -> dict[str, Any]:
    """Returns the last `n` completed steps of length `step_s` (one of STEPS)."""
    end = math.floor((now - LATE_S) / step_s) * step_s
    first = end - n * step_s
    return {"step_s": step_s, "first": first} | columns(history.read(step_s, first, n), step_s)


def columns(steps: Sequence[Mapping[str, int]], step_s: int) -> dict[str, Any]:
    """Returns nonces a second by worker, chats, and seconds to the first token, for each step."""
    names = sorted({name for step in steps for name in step if not name.startswith(":")})
    return {
        "workers": {
            name: [round(step.get(name, 0) / step_s, 2) for step in steps] for name in names
        },
        "chats": [step.get(CHATS, 0) for step in steps],
        "failed": [step.get(FAILED, 0) for step in steps],
        "active": [round(step.get(CHAT_MS, 0) / 1000 / step_s, 2) for step in steps],
        "first_token": [first_token_p95([step]) for step in steps],
    }
