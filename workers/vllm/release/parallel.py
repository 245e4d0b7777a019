"""Communication between vLLM's tensor-parallel ranks and pipeline stages, in all releases."""

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
    """Returns the rows of all tensor-parallel ranks, concatenated in the order of the ranks. All
    ranks must call this function, with equally many rows.
    """
    group = get_tp_group()
    rows = part.new_empty(group.world_size * len(part), *part.shape[1:])
    torch.distributed.all_gather_into_tensor(rows, part, group=group.device_group)
    return rows


def do_all_tensor_ranks(say_so: bool) -> bool:
    """Returns True if `say_so` is True on every tensor-parallel rank. All ranks must call this
    function.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return say_so
    said = torch.tensor([say_so], dtype=torch.int32)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(said.item())


def is_replicated(x: torch.Tensor) -> bool:
    """Returns True if this rank's tensor equals that of the first tensor-parallel rank. All ranks
    must call this function.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return True
    first = x.contiguous().clone()
    torch.distributed.broadcast(first, group.ranks[0], group=group.device_group)
    return torch.equal(first, x)


def is_first_tensor_rank() -> bool:
    """Returns True on the first tensor-parallel rank, which reports the results of its pipeline
    stage. The stage's other ranks have the same results.
    """
    return bool(get_tp_group().rank_in_group == 0)


def as_first_tensor_rank_has_it(x: torch.Tensor) -> None:
    """Overwrites the tensor on each tensor-parallel rank with the first rank's. All ranks must call
    this function.
    """
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast(x, group.ranks[0], group=group.device_group)


def stage_index() -> int:
    return int(get_pp_group().rank_in_group)


def n_stages() -> int:
    return int(get_pp_group().world_size)


@contextmanager
def recorded_sums() -> Iterator[torch.cuda.Stream | None]:
    """Yields the CUDA stream in which to record a CUDA graph that can contain sums over the
    tensor-parallel ranks. Yields None with a single rank, for which any stream works. All ranks
    must enter and leave the context. If one rank raises an error inside, the other ranks raise
    RuntimeError.
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
    """Returns vLLM's capture context with the stream of all recordings. Graphs that were recorded
    in several streams would share no memory.
    """
    return parallel_state.GraphCaptureContext(torch.cuda.Stream())


def send(tensors: Iterable[torch.Tensor], stage: int) -> list[Any]:
    """Starts sending tensors to a pipeline stage. Returns one handle per tensor. The caller must
    keep the tensors and the handles until the handles are completed.
    """
    group = get_pp_group()
    to = group.ranks[stage]
    return [torch.distributed.isend(one, to, group=group.device_group) for one in tensors]


def receive(tensors: Iterable[torch.Tensor], stage: int) -> None:
    """Receives data from a pipeline stage into the tensors. On a GPU, only queues the transfer and
    does not wait.
    """
    group = get_pp_group()
    for one in tensors:
        torch.distributed.recv(one, group.ranks[stage], group=group.device_group)


def wait_for_pending_sends(worker: Any) -> None:
    """Waits until the activations of an earlier chat step have been sent to the next pipeline
    stage.
    """
    for handle in getattr(worker, "_pp_send_work", None) or ():
        handle.wait()
    if hasattr(worker, "_pp_send_work"):
        worker._pp_send_work = []
