"""Statistics of chat validations, in which an engine scores the answers of other nodes."""

from dataclasses import dataclass, field
from typing import Literal

# Scoring in one pass, by decode steps, or not at all.
Way = Literal["pass", "steps", "none"]


@dataclass
class Validations:
    """Counters of one engine's chat validations. The event loop writes; any thread may read."""

    way: Way = "none"  # for requests that allow both ways
    count: dict[str, int] = field(default_factory=lambda: {"pass": 0, "steps": 0})  # requests
    # time of scoring
    seconds: dict[str, float] = field(default_factory=lambda: {"pass": 0.0, "steps": 0.0})

    def add(self, way: str, seconds: float) -> None:
        self.count[way] += 1
        self.seconds[way] += seconds

    def figures(self) -> dict[str, int | float]:
        """Returns the number and seconds of chat validations by method. The keys are field names of
        the heartbeat, such as `validations_pass`.
        """
        counts = {f"validations_{way}": n for way, n in self.count.items()}
        return counts | {f"validation_{way}_s": round(s, 3) for way, s in self.seconds.items()}
