"""How an engine scores known tokens, and how many it has scored: what is told of it to
operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# In one pass; by decode steps; not at all.
Way = Literal["pass", "steps", "none"]


@dataclass
class Validations:
    """Counts chat validations of one engine. Written on the event loop, read by any thread."""

    way: Way = "none"  # of requests that can go either
    count: dict[str, int] = field(default_factory=lambda: {"pass": 0, "steps": 0})  # answered
    seconds: dict[str, float] = field(
        default_factory=lambda: {"pass": 0.0, "steps": 0.0}
    )  # that scoring took

    def add(self, way: str, seconds: float) -> None:
        self.count[way] += 1
        self.seconds[way] += seconds

    def told(self) -> dict[str, int | float]:
        """For the heartbeat, by way."""
        counts = {f"validations_{way}": n for way, n in self.count.items()}
        return counts | {f"validation_{way}_s": round(s, 3) for way, s in self.seconds.items()}
