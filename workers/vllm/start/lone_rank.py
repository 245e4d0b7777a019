"""Keeps an engine with a single rank from opening ports: it needs no connections."""

from importlib import import_module
from typing import Any

_FAKE = "fake"


def listen_to_nobody() -> None:
    """Replaces Gloo's process groups of a single rank by torch's `fake` backend, in each of vLLM's
    processes before it creates groups.

    Each Gloo group, thirteen for an engine of one rank, listens on a port, and ends the process if
    a client opens more connections than the process can have files.
    """
    dist: Any = import_module("torch.distributed")
    import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    init, new_group = dist.init_process_group, dist.new_group

    def init_alone(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        *args: Any,
        **more: Any,
    ) -> None:
        if world_size == 1 and backend == "gloo" and not args:
            init_method, more = None, {**more, "store": dist.HashStore()}
        if world_size == 1 and backend is not None:
            backend = backend.replace("gloo", _FAKE)
        init(backend, init_method, timeout, world_size, *args, **more)

    def new_group_alone(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **more: Any
    ) -> Any:
        if backend == "gloo" and dist.get_world_size() == 1:
            backend = _FAKE
        return new_group(ranks, timeout, backend, *args, **more)

    dist.init_process_group, dist.new_group = init_alone, new_group_alone
