"""Kernels in vLLM's place for one slice, used where a trial found them right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Every so many rows are compared, and each way is timed so often.
_EVERY, _TIMES = 61, 3
OTHER_BITS = "gives other bits: not used"

V = TypeVar("V")
Compute = Callable[[], Any]


class Trial(Generic[V]):
    """What was found out about calls, by what they have in common (`key`)."""

    def __init__(self) -> None:
        self.found: dict[Any, V] = {}

    def of(self, key: Any, find: Callable[[], V]) -> V | None:
        """Finds it out once. None: not while work is recorded, because a trial waits for its
        outcome."""
        if key not in self.found:
            if torch.cuda.is_current_stream_capturing():
                return None
            self.found[key] = find()
        return self.found[key]


def is_right(what: str, why_not: Callable[[], str]) -> bool:
    """True if `why_not` computes and finds nothing; says so where not. An error in a kernel would
    end the engine."""
    try:
        why = why_not()
    except Exception as error:  # a GPU for which the kernel does not compile
        why = f"cannot be used: {error}"
    if why:
        logger.warning("%s %s", what, why)
    return not why


@contextmanager
def instead(of: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Within, a function of a class or module of vLLM's calls `other` with itself before its
    arguments. `of` None: this release has none."""
    if of is None:
        yield
        return
    own, kept = getattr(of, name), vars(of).get(name)

    def call(*args: Any, **named: Any) -> Any:
        return other(own, *args, **named)

    setattr(of, name, staticmethod(call) if isinstance(kept, staticmethod) else call)
    try:
        yield
    finally:
        if kept is None:
            delattr(of, name)
        else:
            setattr(of, name, kept)


def quickest(own: Compute, ways: Sequence[Compute], out: Tensor) -> int | None:
    """The place in `ways` of the quickest that writes the bits that `own` writes to out (rows,
    ...); None: none of them takes less time than `own`."""
    own()
    expected = out[::_EVERY].clone()
    found, least_ms = None, milliseconds(own)
    for place, compute in enumerate(ways):

        def why_not(compute: Compute = compute) -> str:
            out.fill_(float("nan"))
            compute()
            return "" if torch.equal(out[::_EVERY], expected) else OTHER_BITS

        right = is_right(f"kernel {place} for products of experts", why_not)
        if right and (ms := milliseconds(compute)) < least_ms:
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
