"""The node's history as the console draws it: columns by time, of steps that are over."""

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

# Seconds after a step's end when all that belongs to it is told (Services.reporting).
LATE_S = 1.5


def shown(history: History, step_s: int, now: float, n: int = SHOWN) -> dict[str, Any]:
    """The last `n` steps of that length, one of STEPS, that are over."""
    end = math.floor((now - LATE_S) / step_s) * step_s
    first = end - n * step_s
    return {"step_s": step_s, "first": first} | columns(history.read(step_s, first, n), step_s)


def columns(steps: Sequence[Mapping[str, int]], step_s: int) -> dict[str, Any]:
    """Returns for each step nonces a second by worker, chats, and seconds to the first token."""
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
