"""What grows from segment to segment: a line through the figures of each look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Growth:
    """Figures by name, of one look after each segment."""

    looks: list[dict[str, float]] = field(default_factory=list)

    def look(self, figures: Mapping[str, float]) -> None:
        self.looks.append(dict(figures))

    def per_segment(self) -> dict[str, float]:
        """By how much each figure grows a segment, once all has been running for a while.

        Of what is in each look after the first quarter.
        """
        counted = self.looks[len(self.looks) // 4 :]
        names = set(counted[0]).intersection(*counted)
        return {name: slope([look[name] for look in counted]) for name in sorted(names)}


def slope(figures: Sequence[float]) -> float:
    """Of the line that lies nearest to all figures, by least squares."""
    if len(figures) < 2:
        return 0.0
    return float(np.polyfit(range(len(figures)), figures, 1)[0])
