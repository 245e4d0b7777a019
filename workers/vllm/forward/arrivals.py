"""Numbers of micro-batches on their way from device to host, which does not wait for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import JsonValue

from poc_core.schemes.base import Batch


@dataclass
class _Arrival:
    micro_batch: int
    batch: Batch
    numbers: torch.Tensor  # on the host
    copied: torch.cuda.Event | None  # None: the numbers are there


class Arrivals:
    """Numbers under way, in the order in which they were launched."""

    def __init__(self) -> None:
        self._underway: list[_Arrival] = []

    def expect(self, micro_batch: int, batch: Batch) -> None:
        """Begins to copy the numbers of a micro-batch whose last pass is launched."""
        numbers = batch.numbers()
        copied = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            numbers = host
        self._underway.append(_Arrival(micro_batch, batch, numbers, copied))

    def take(self) -> dict[int, list[JsonValue]]:
        """The values that are there, by micro-batch."""
        values: dict[int, list[JsonValue]] = {}
        while self._underway:
            first = self._underway[0]
            if first.copied is not None and not first.copied.query():
                break
            values[first.micro_batch] = first.batch.values(first.numbers)
            self._underway.pop(0)
        return values

    def forget(self) -> None:
        self._underway.clear()
