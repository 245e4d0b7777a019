"""Measures a rank's time between the slices of proofs, for benchmarks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Spent:
    """Seconds by part, and the number of slices. On the host: `launch_s` (includes `metadata_s`),
    `waits_s` (for the device, before a launch), `between_s` (between calls of the rank). On the
    device: `busy_s`.
    """

    def __init__(self) -> None:
        self._ended: float | None = None
        self._parts: dict[str, float] = {}

    def begin_tick(self) -> None:
        """Records that a call of the rank begins."""
        if self._ended is not None:
            self._add("between_s", time.perf_counter() - self._ended)

    def end_tick(self, ran: Sequence[float]) -> None:
        """Records that the call ends. `ran`: device seconds of the slices that ended."""
        self._ended = time.perf_counter()
        self._add("slices", len(ran))
        self._add("busy_s", sum(ran))

    @contextmanager
    def in_part(self, part: str) -> Iterator[None]:
        """Adds the host's time in the context to the part."""
        began = time.perf_counter()
        yield
        self._add(part, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        """Returns all parts and resets them."""
        parts, self._parts, self._ended = self._parts, {}, None
        return parts

    def _add(self, part: str, amount: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + amount
