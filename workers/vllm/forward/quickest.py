"""Which of several ways to compute products of experts takes the least time, of those whose bits
are vLLM's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Every so many rows are compared, and each way is timed so often.
_EVERY, _TIMES = 61, 3

Compute = Callable[[], Any]


def quickest(own: Compute, ways: Sequence[Compute], out: Tensor) -> int | None:
    """The place in `ways` of the quickest that writes the bits that `own` writes to out (rows,
    ...); None: none of them takes less time than `own`."""
    own()
    expected = out[::_EVERY].clone()
    found, least_ms = None, milliseconds(own)
    for place, compute in enumerate(ways):
        try:
            out.fill_(float("nan"))
            compute()
            if not torch.equal(out[::_EVERY], expected):
                logger.warning("kernel %d for products of experts has other bits: not used", place)
                continue
            ms = milliseconds(compute)
        except Exception as error:
            logger.warning("kernel %d for products of experts cannot be used: %s", place, error)
            continue
        if ms < least_ms:
            found, least_ms = place, ms
    return found


def milliseconds(compute: Compute) -> float:
    """The device's time, the shortest of a few."""
    times = []
    for _ in range(_TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)
