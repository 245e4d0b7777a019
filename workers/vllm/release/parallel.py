"""Communication between vLLM's tensor-parallel ranks, and between its pipeline stages."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import get_pp_group, get_tp_group


def tensor_ranks() -> tuple[int, int]:
    """Returns this process's tensor-parallel rank, and the number of tensor-parallel ranks."""
    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def of_all_tensor_ranks(part: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all tensor-parallel ranks. All must call it, with equally many rows."""
    group = get_tp_group()
    rows = part.new_empty(group.world_size * len(part), *part.shape[1:])
    torch.distributed.all_gather_into_tensor(rows, part, group=group.device_group)
    return rows


def do_all_tensor_ranks(say_so: bool) -> bool:
    """Returns True if `say_so` is True on every tensor-parallel rank. All ranks must call it."""
    group = get_tp_group()
    if group.world_size == 1:
        return say_so
    said = torch.tensor([say_so], dtype=torch.int32)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(said.item())


def is_replicated(x: torch.Tensor) -> bool:
    """Returns True if `x` equals the first tensor-parallel rank's `x`. All ranks must call it."""
    group = get_tp_group()
    if group.world_size == 1:
        return True
    first = x.contiguous().clone()
    torch.distributed.broadcast(first, group.ranks[0], group=group.device_group)
    return torch.equal(first, x)


def is_first_tensor_rank() -> bool:
    """Returns True on the tensor-parallel rank that reports its stage's results."""
    return bool(get_tp_group().rank_in_group == 0)


def as_first_tensor_rank_has_it(x: torch.Tensor) -> None:
    """Overwrites `x` on all tensor-parallel ranks with the first rank's `x`. All must call it."""
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast(x, group.ranks[0], group=group.device_group)


def stage_index() -> int:
    return int(get_pp_group().rank_in_group)


def n_stages() -> int:
    return int(get_pp_group().world_size)


@contextmanager
def recorded_sums() -> Iterator[torch.cuda.Stream | None]:
    """Yields the CUDA stream for recording a graph with sums over tensor-parallel ranks; None with
    a single rank. All ranks must enter and leave the context. An error on one rank raises
    RuntimeError on the others.
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
    """Returns vLLM's context to capture graphs. Its one stream lets all graphs share memory."""
    return parallel_state.GraphCaptureContext(torch.cuda.Stream())


def send(tensors: Iterable[torch.Tensor], stage: int) -> list[Any]:
    """Starts sending tensors to a pipeline stage. Returns one handle per tensor. The caller must
    keep the tensors and the handles until the handles are completed.
    """
    group = get_pp_group()
    to = group.ranks[stage]
    return [torch.distributed.isend(one, to, group=group.device_group) for one in tensors]


def receive(tensors: Iterable[torch.Tensor], stage: int) -> None:
    """Receives a pipeline stage's data into the tensors. On a GPU, only queues the transfer."""
    group = get_pp_group()
    for one in tensors:
        torch.distributed.recv(one, group.ranks[stage], group=group.device_group)


def wait_for_pending_sends(worker: Any) -> None:
    """Waits until an earlier chat step's activations were sent to the next stage."""
    for handle in getattr(worker, "_pp_send_work", None) or ():
        handle.wait()
    if hasattr(worker, "_pp_send_work"):
        worker._pp_send_work = []
