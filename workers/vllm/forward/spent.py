"""Measures a rank's time between the slices of proofs, for benchmarks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Spent:
    """Seconds by part, and how many slices they were for.

    The host's: `launch_s` (with `metadata_s`), `waits_s` (for the device, before a launch),
    `between_s` (no call into the rank). The device's: `busy_s`.
    """

    def __init__(self) -> None:
        self._ended: float | None = None
        self._parts: dict[str, float] = {}

    def begin_tick(self) -> None:
        """A call into the rank begins."""
        if self._ended is not None:
            self._add("between_s", time.perf_counter() - self._ended)

    def end_tick(self, ran: Sequence[float]) -> None:
        """The call ends. `ran`: device seconds of the slices that ended."""
        self._ended = time.perf_counter()
        self._add("slices", len(ran))
        self._add("busy_s", sum(ran))

    @contextmanager
    def in_part(self, part: str) -> Iterator[None]:
        """The host's time within is the part's."""
        began = time.perf_counter()
        yield
        self._add(part, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        """All parts since the last call."""
        parts, self._parts, self._ended = self._parts, {}, None
        return parts

    def _add(self, part: str, amount: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + amount
