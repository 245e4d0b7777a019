"""vLLM's tensor-parallel ranks and pipeline stages, by release."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import get_pp_group, get_tp_group


def tensor_ranks() -> tuple[int, int]:
    """Returns this process's tensor-parallel rank, and the number of ranks."""
    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def of_all_tensor_ranks(part: torch.Tensor) -> torch.Tensor:
    """Returns all tensor-parallel ranks' rows in order. All must call, with equally many rows."""
    group = get_tp_group()
    rows = part.new_empty(group.world_size * len(part), *part.shape[1:])
    torch.distributed.all_gather_into_tensor(rows, part, group=group.device_group)
    return rows


def do_all_tensor_ranks(say_so: bool) -> bool:
    """Returns whether `say_so` is true on every tensor-parallel rank. All ranks must call."""
    group = get_tp_group()
    if group.world_size == 1:
        return say_so
    said = torch.tensor([say_so], dtype=torch.int32)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(said.item())


def is_replicated(x: torch.Tensor) -> bool:
    """Returns whether this rank's tensor equals the first tensor-parallel rank's. All must call."""
    group = get_tp_group()
    if group.world_size == 1:
        return True
    first = x.contiguous().clone()
    torch.distributed.broadcast(first, group.ranks[0], group=group.device_group)
    return torch.equal(first, x)


def is_first_tensor_rank() -> bool:
    """Returns whether this rank reports its pipeline stage's results, which all its ranks have."""
    return bool(get_tp_group().rank_in_group == 0)


def as_first_tensor_rank_has_it(x: torch.Tensor) -> None:
    """Overwrites each rank's tensor with the first tensor-parallel rank's. All ranks must call."""
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast(x, group.ranks[0], group=group.device_group)


def stage_index() -> int:
    return int(get_pp_group().rank_in_group)


def n_stages() -> int:
    return int(get_pp_group().world_size)


@contextmanager
def recorded_sums() -> Iterator[torch.cuda.Stream | None]:
    """Yields the stream for recording a CUDA graph that may hold sums over the tensor-parallel
    ranks. Yields None with a single rank, for which any stream works. All ranks must enter and
    leave the context. If one rank fails inside, the other ranks raise RuntimeError.
    """
    group = get_tp_group()
    if group.world_size == 1:
        yield None
        return
    communicator = getattr(group.device_communicator, "ca_comm", None)
    with ExitStack() as after, group.graph_capture(_sums_capture()) as one:
        failure: Exception | None = None
        try:
            yield one.stream
        except Exception as error:
            failure = error
        if do_all_tensor_ranks(failure is None):
            return
        # vLLM's exit exchanges recorded buffers: unequal numbers would end the processes.
        if communicator is not None:
            after.callback(setattr, communicator, "disabled", communicator.disabled)
            communicator.disabled = True
        raise failure or RuntimeError("another rank could not record its part")


@functools.cache
def _sums_capture() -> Any:
    """Returns the stream for all recordings: graphs of several streams would share no memory."""
    return parallel_state.GraphCaptureContext(torch.cuda.Stream())


def send(tensors: Iterable[torch.Tensor], stage: int) -> list[Any]:
    """Starts sending to a pipeline stage. Keep handles and tensors until they are completed."""
    group = get_pp_group()
    to = group.ranks[stage]
    return [torch.distributed.isend(one, to, group=group.device_group) for one in tensors]


def receive(tensors: Iterable[torch.Tensor], stage: int) -> None:
    """Receives from a pipeline stage into the tensors. On a GPU this is only queued."""
    group = get_pp_group()
    for one in tensors:
        torch.distributed.recv(one, group.ranks[stage], group=group.device_group)


def wait_for_pending_sends(worker: Any) -> None:
    """Waits until an earlier chat step's asynchronous sends to the next stage are complete."""
    for handle in getattr(worker, "_pp_send_work", None) or ():
        handle.wait()
    if hasattr(worker, "_pp_send_work"):
        worker._pp_send_work = []
