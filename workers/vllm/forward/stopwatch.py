"""Measures how long slices use a device, and limits how many of them wait on the device."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Slices on the device at a time: one runs, and one waits to avoid a gap. Chat waits for both.
MOST_IN_FLIGHT = 2


class Stopwatch:
    """A meter of runs of device work, each with a `tag`, by the host's clock: right for CPUs."""

    def __init__(self) -> None:
        self._began = 0.0
        self._ended: Any = None  # the last run
        self._gaps_s = 0.0
        self._done: list[tuple[tuple[int, ...], float]] = []

    def begin(self) -> None:
        """Waits, before a launch, until fewer than MOST_IN_FLIGHT runs are on the device."""
        self._began = time.perf_counter()
        if self._ended is not None:
            self._gaps_s += self._began - self._ended

    def end(self, tag: tuple[int, ...]) -> None:
        """Records that all of the run's work is launched."""
        self._ended = time.perf_counter()
        self._done.append((tag, self._ended - self._began))

    def wait(self, first: int | None = None) -> None:
        """Waits for the runs on the device. `first`: only runs whose tag begins with it."""

    def take(self) -> list[tuple[tuple[int, ...], float]]:
        """Returns (tag, seconds) of the runs that ended since the last call, in order."""
        done, self._done = self._done, []
        return done

    def gaps_s(self) -> float:
        """Returns and resets the seconds between runs."""
        gaps_s, self._gaps_s, self._ended = self._gaps_s, 0.0, None
        return gaps_s


class EventStopwatch(Stopwatch):
    """A stopwatch for GPUs: events in the stream measure the GPU's time, without further waits."""

    def __init__(self) -> None:
        super().__init__()
        self._event: torch.cuda.Event | None = None  # that began the last run
        self._running: deque[tuple[tuple[int, ...], torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        while len(self._running) >= MOST_IN_FLIGHT:
            self._retire()
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def end(self, tag: tuple[int, ...]) -> None:
        assert self._event is not None
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._running.append((tag, self._event, ended))

    def wait(self, first: int | None = None) -> None:
        while any(first is None or tag[0] == first for tag, _, _ in self._running):
            self._retire()

    def take(self) -> list[tuple[tuple[int, ...], float]]:
        while self._running and self._running[0][2].query():
            self._retire()
        return super().take()

    def _retire(self) -> None:
        tag, began, ended = self._running.popleft()
        ended.synchronize()
        self._done.append((tag, began.elapsed_time(ended) / 1000))
        if self._ended is not None:
            self._gaps_s += self._ended.elapsed_time(began) / 1000
        self._ended = ended


def stopwatch_for(device: torch.device) -> Stopwatch:
    return EventStopwatch() if device.type == "cuda" else Stopwatch()


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
