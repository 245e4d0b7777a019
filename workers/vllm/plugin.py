"""A vLLM plugin (entry point `vllm.general_plugins`), which each of vLLM's processes loads."""

import gc
import multiprocessing
import os
from importlib import import_module
from typing import Any

from workers.endings import end_like_this
from workers.vllm.release import faults
from workers.vllm.start import lifeline, random_weights


def register() -> None:
    """Patches vLLM in this process: to save CPU time, end quickly, and avoid known faults."""
    if multiprocessing.parent_process() is not None:
        gc.enable()  # see start/spawned.py
    if lifeline.VARIABLE in os.environ:
        from workers.vllm.release import engine_core, model_parts

        engine_core.let_readers_sleep()
        engine_core.compile_grammars_after_steps()
        engine_core.end_slow_grammars()
        engine_core.let_core_count()
        faults.plan_for_caches_of_8_bits()
        listen_to_nobody()
        if random_weights.are_enabled():
            model_parts.make_up_weights(random_weights.draw)
        end_like_this()


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
