"""Records work for a device once, and replays it with the same tensors. A recording is a CUDA graph
on a GPU.
"""

import dataclasses
import enum
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

# `off` in an engine's environment turns recording off.
SWITCH = "PROOFLINE_GRAPHS"
_NCCL_MEMORY = "VLLM_USE_NCCL_SYMM_MEM"
# Variables with the settings of torch's allocator, by release.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# FlashInfer's plan for sparse attention on Hopper, shared by all batches of an engine: building a
# step's metadata updates the plan, in tensors that keep their addresses.
_PLANNED_ANEW = "_SM90State"

Replay = Callable[[], Any]
"""A function that replays recorded work. The returned tensors are valid until its next call."""

Plain = dict[str, Any]
"""Attention metadata by layer: dataclasses of tensors and plain values."""

RecordedSums = Callable[[], AbstractContextManager["torch.cuda.Stream | None"]]
"""A function that returns the context for recording sums over ranks. The context yields the stream
to record in.
"""


def why_off(shares_sums: bool) -> str:
    """Returns why this engine does not record CUDA graphs, or "" if it does. `shares_sums`: True if
    the engine has several tensor-parallel ranks.
    """
    if os.environ.get(SWITCH) == "off":
        return f"{SWITCH}=off"
    allocator = " ".join(os.environ.get(name, "") for name in _ALLOCATOR).lower()
    if shares_sums and "expandable_segments:true" in allocator:
        return f"ranks can share no sums in expandable segments ({' or '.join(_ALLOCATOR)})"
    if shares_sums and os.environ.get(_NCCL_MEMORY) == "1":  # vLLM would end chat's memory pool
        return f"sums in NCCL's own memory can be recorded in chat's graphs alone ({_NCCL_MEMORY})"
    return ""


class NotReplayableError(RuntimeError):
    """Recorded work cannot be replayed, because more than its tensors' contents has changed."""


class Recorder(Protocol):
    def record(self, work: Callable[[], Any]) -> Replay:
        """Records `work` and returns a function that replays it. Recording computes nothing, so
        states do not change. If tensor-parallel ranks record the same work, an error on one rank
        raises an error on all.
        """

    def renewed(self, kept: Plain, new: Plain) -> Plain:
        """Returns metadata for a replay: the recorded metadata `kept`, with the contents of `new`.
        NotReplayableError if the two differ in more than the contents of their tensors.
        """


class GraphRecorder:
    """A recorder of CUDA graphs. The graphs share memory, so they must be replayed one at a time,
    in the stream of all other work.
    """

    def __init__(self, sums: RecordedSums) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._sums = sums

    def record(self, work: Callable[[], Any]) -> Replay:
        stream = torch.cuda.current_stream()
        try:
            # all that may fail is inside, because the ranks compare results at the exit
            with self._sums() as its:
                graph = torch.cuda.CUDAGraph()
                # Not global: another thread of vLLM waits for events during the capture.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=its, capture_error_mode="thread_local"
                ):
                    output = work()
        except BaseException:
            # torch leaves the stream of an invalid capture current, and the memory pool open:
            # memory could no longer be freed.
            torch.cuda.set_stream(stream)
            with suppress(Exception):
                # a private function, which a release of torch may lack
                from torch.cuda.memory import _cuda_endAllocateToPool

                _cuda_endAllocateToPool(stream.device_index, self._pool)
            raise

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    def renewed(self, kept: Plain, new: Plain) -> Plain:
        done: set[int] = set()
        for name, one in kept.items():
            if id(one) not in done:  # layers share objects
                done.add(id(one))
                refill(one, new[name])
        return kept


class RunAgain:
    """A recorder for CPUs. It replays work by running it again, so a CPU runs the same code as a
    GPU.
    """

    def record(self, work: Callable[[], Any]) -> Replay:
        return work

    def renewed(self, kept: Plain, new: Plain) -> Plain:
        """Returns `new` itself, because vLLM's metadata for CPUs contains pointers into itself."""
        return new


def recorder_for(device: torch.device, sums: RecordedSums) -> Recorder:
    return GraphRecorder(sums) if device.type == "cuda" else RunAgain()


def refill(kept: Any, new: Any) -> None:
    """Copies the tensors in `new` into the tensors in `kept`; both are dataclasses, lists or
    tensors. NotReplayableError if anything else differs, or if an object of another type could
    contain tensors.
    """
    if type(kept) is not type(new):
        raise NotReplayableError(f"{type(kept).__name__} became {type(new).__name__}")
    if _is_made_anew(kept, new):
        return
    if isinstance(kept, Tensor):
        _refill_tensor(kept, new)
    elif dataclasses.is_dataclass(kept):
        for field in dataclasses.fields(kept):
            refill(getattr(kept, field.name, None), getattr(new, field.name, None))
    elif isinstance(kept, list | tuple):
        if len(kept) != len(new):
            raise NotReplayableError(f"{len(kept)} items became {len(new)}")
        for one, other in zip(kept, new, strict=True):
            refill(one, other)
    elif not isinstance(kept, bool | int | float | str | enum.Enum | torch.dtype | None):
        raise NotReplayableError(f"a {type(kept).__name__} may hide tensors")
    elif kept != new:
        raise NotReplayableError(f"{kept!r} became {new!r}")


def _is_made_anew(kept: Any, new: Any) -> bool:
    """Returns True if `new` need not be copied to `kept`: the two are one object, or the recorded
    work itself fills `kept`. Recorded work fills FlashMLA's plan if `new` has an empty plan. It
    also fills an empty dictionary of plans by layer.
    """
    if isinstance(kept, dict):
        return not kept and not new
    if type(kept).__name__ == _PLANNED_ANEW:
        return kept is new
    return bool(getattr(kept, "have_initialized", False)) and not new.have_initialized


def _refill_tensor(kept: Tensor, new: Tensor) -> None:
    if kept.shape != new.shape or kept.dtype != new.dtype or kept.device != new.device:
        raise NotReplayableError(f"a tensor {tuple(kept.shape)} became {tuple(new.shape)}")
    if kept.data_ptr() != new.data_ptr() or kept.stride() != new.stride():
        kept.copy_(new)
