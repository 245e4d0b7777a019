"""Trials of our kernels: each is compared with vLLM's kernel before it replaces that kernel in a
proof's slice.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Every n-th row is compared, and each kernel is timed this many times.
_EVERY, _TIMES = 61, 3
OTHER_BITS = "gives other bits: not used"

V = TypeVar("V")
Compute = Callable[[], Any]


class Trial(Generic[V]):
    """A cache of trial results. Calls with the same `key` share one result."""

    def __init__(self) -> None:
        self.found: dict[Any, V] = {}

    def of(self, key: Any, find: Callable[[], V]) -> V | None:
        """Returns the result for a key. The first call for a key runs the trial, `find`. Returns
        None for a new key while a CUDA graph is recorded, because a trial waits for the device.
        """
        if key not in self.found:
            if torch.cuda.is_current_stream_capturing():
                return None
            self.found[key] = find()
        return self.found[key]


def is_right(what: str, why_not: Callable[[], str]) -> bool:
    """Returns True if a trial finds no error. Logs the error otherwise. `what`: the kernel's name.
    `why_not`: runs the trial, and returns the error or ""; an exception also counts as an error.
    """
    try:
        why = why_not()
    except Exception as error:  # e.g. a GPU for which the kernel does not compile
        why = f"cannot be used: {error}"
    if why:
        logger.warning("%s %s", what, why)
    return not why


@contextmanager
def instead(of: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function of a vLLM class or module inside the context. `of`: the class or module;
    None changes nothing. `other`: called with the original function, followed by the arguments.
    """
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
    """Returns the index of the fastest of `ways` (our kernels) whose results are bit-identical to
    those of `own` (vLLM's kernel). Returns None if `own` is faster than these. `out`: the tensor to
    which all of them write.
    """
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
    """Returns the device's time for `compute`: the shortest of a few runs."""
    times = []
    for _ in range(_TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)
