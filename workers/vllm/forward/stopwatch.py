"""Measures how long slices use a device, and limits how many slices wait on the device."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Slices on the device at a time: one runs, and one waits to avoid a gap. Chat waits for both.
MOST_IN_FLIGHT = 2


class Stopwatch:
    """Measures slices by the host's clock, which is correct for CPUs. `tag`: a slice's identity."""

    def __init__(self) -> None:
        self._began = 0.0
        self._ended: Any = None  # when the last slice ended
        self._gaps_s = 0.0
        self._done: list[tuple[tuple[int, ...], float]] = []

    def begin(self) -> None:
        """Records that the launch of a slice begins. On a GPU, first waits until fewer than
        MOST_IN_FLIGHT slices are on the device.
        """
        self._began = time.perf_counter()
        if self._ended is not None:
            self._gaps_s += self._began - self._ended

    def end(self, tag: tuple[int, ...]) -> None:
        """Records that all work of the slice is launched."""
        self._ended = time.perf_counter()
        self._done.append((tag, self._ended - self._began))

    def wait(self, first: int | None = None) -> None:
        """Waits until the slices on the device have ended. `first`: waits only for slices whose tag
        begins with this number.
        """

    def take(self) -> list[tuple[tuple[int, ...], float]]:
        """Returns (tag, seconds) of each slice that ended since the last call, in order."""
        done, self._done = self._done, []
        return done

    def gaps_s(self) -> float:
        """Returns the sum of the gaps between slices since the last call, in seconds."""
        gaps_s, self._gaps_s, self._ended = self._gaps_s, 0.0, None
        return gaps_s


class EventStopwatch(Stopwatch):
    """A stopwatch for GPUs. CUDA events measure the GPU's time, so the host need not wait for each
    slice.
    """

    def __init__(self) -> None:
        super().__init__()
        self._event: torch.cuda.Event | None = None  # recorded when the last slice began
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
    """Sums of a rank's time in seconds, by name, and its number of slices (`slices`). Time of the
    host: `launch_s` (includes `metadata_s`), `waits_s` (for the device, before a launch),
    `between_s` (between two calls of the rank). Time of the device: `busy_s`.
    """

    def __init__(self) -> None:
        self._ended: float | None = None
        self._parts: dict[str, float] = {}

    def begin_tick(self) -> None:
        """Records that a call of the rank begins."""
        if self._ended is not None:
            self._add("between_s", time.perf_counter() - self._ended)

    def end_tick(self, ran: Sequence[float]) -> None:
        """Records that the call ends. `ran`: the device's seconds for each slice that has ended."""
        self._ended = time.perf_counter()
        self._add("slices", len(ran))
        self._add("busy_s", sum(ran))

    @contextmanager
    def in_part(self, part: str) -> Iterator[None]:
        """Adds the CPU-side time spent inside the context to the sum of `part`."""
        began = time.perf_counter()
        yield
        self._add(part, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        """Returns all sums and resets them."""
        parts, self._parts, self._ended = self._parts, {}, None
        return parts

    def _add(self, part: str, amount: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + amount
