"""vLLM's tensor-parallel ranks and pipeline stages, by release."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import get_pp_group, get_tp_group


def tensor_ranks() -> tuple[int, int]:
    """This process's tensor-parallel rank, and how many there are."""
    group = get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def of_all_tensor_ranks(part: torch.Tensor) -> torch.Tensor:
    """The rows of all tensor-parallel ranks, as many of each, in order. All ranks must ask."""
    group = get_tp_group()
    rows = part.new_empty(group.world_size * len(part), *part.shape[1:])
    torch.distributed.all_gather_into_tensor(rows, part, group=group.device_group)
    return rows


def do_all_tensor_ranks(say_so: bool) -> bool:
    """True if every tensor-parallel rank says so. All ranks must ask."""
    group = get_tp_group()
    if group.world_size == 1:
        return say_so
    said = torch.tensor([say_so], dtype=torch.int32)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(said.item())


def is_replicated(x: torch.Tensor) -> bool:
    """True if this tensor-parallel rank's tensor is the first one's. All ranks must ask."""
    group = get_tp_group()
    if group.world_size == 1:
        return True
    first = x.contiguous().clone()
    torch.distributed.broadcast(first, group.ranks[0], group=group.device_group)
    return torch.equal(first, x)


def is_first_tensor_rank() -> bool:
    """The one rank of a pipeline stage that holds and reports results, which all of them have."""
    return bool(get_tp_group().rank_in_group == 0)


def as_first_tensor_rank_has_it(x: torch.Tensor) -> None:
    """Fills the tensor of each tensor-parallel rank with the first one's, so that all go on
    from the same. All ranks must ask.
    """
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast(x, group.ranks[0], group=group.device_group)


def stage_index() -> int:
    """Which pipeline stage this process computes."""
    return int(get_pp_group().rank_in_group)


def n_stages() -> int:
    """How many pipeline stages compute the model."""
    return int(get_pp_group().world_size)


@contextmanager
def recorded_sums() -> Iterator[torch.cuda.Stream | None]:
    """Within, a CUDA graph may hold sums over the tensor-parallel ranks. All ranks must enter and
    leave it. Gives the stream to record in; None: there is one rank, and any stream will do.

    Where one rank fails within, all fail. RuntimeError: another rank did.
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
        # On its way out vLLM's own sum tells ranks what they recorded: all must have recorded as
        # many buffers, or their processes end.
        if communicator is not None:
            after.callback(setattr, communicator, "disabled", communicator.disabled)
            communicator.disabled = True
        raise failure or RuntimeError("another rank could not record its part")


@functools.cache
def _sums_capture() -> Any:
    """The stream in which all is recorded: graphs of several streams would share no memory."""
    return parallel_state.GraphCaptureContext(torch.cuda.Stream())


def send_to_next_stage(tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Begins to send; the handles must be kept, with the tensors, until each says
    `is_completed`.
    """
    group = get_pp_group()
    to = group.ranks[group.rank_in_group + 1]
    return [
        torch.distributed.isend(tensors[name], to, group=group.device_group)
        for name in sorted(tensors)
    ]


def receive_from_previous_stage(tensors: dict[str, torch.Tensor]) -> None:
    """Fills the tensors. On a GPU this only queues it."""
    group = get_pp_group()
    source = group.ranks[group.rank_in_group - 1]
    for name in sorted(tensors):
        torch.distributed.recv(tensors[name], source, group=group.device_group)


def send_to_first_stage(tensor: torch.Tensor) -> Any:
    """Sends to the first stage; returns one handle, like send_to_next_stage."""
    group = get_pp_group()
    return torch.distributed.isend(tensor, group.ranks[0], group=group.device_group)


def receive_from_last_stage(tensor: torch.Tensor) -> None:
    """Fills the tensor. On a GPU this only queues it."""
    group = get_pp_group()
    torch.distributed.recv(tensor, group.ranks[-1], group=group.device_group)


def wait_for_pending_sends(worker: Any) -> None:
    """Let an earlier chat step's asynchronous sends to the next stage end before this rank
    sends again.
    """
    for handle in getattr(worker, "_pp_send_work", None) or ():
        handle.wait()
    if hasattr(worker, "_pp_send_work"):
        worker._pp_send_work = []
