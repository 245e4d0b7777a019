"""A vLLM plugin (entry point `vllm.general_plugins`), which each of vLLM's processes loads."""

import gc
import multiprocessing
import os

from workers.endings import end_like_this
from workers.vllm.release import faults
from workers.vllm.start import lifeline, lone_rank, random_weights


def register() -> None:
    """Patches vLLM in this process: for few cores, a quick end, and without known faults."""
    if multiprocessing.parent_process() is not None:
        gc.enable()  # see start/spawned.py
    if lifeline.VARIABLE in os.environ:
        from workers.vllm.release import engine_core, model_parts

        engine_core.let_readers_sleep()
        engine_core.compile_grammars_after_steps()
        engine_core.let_core_count()
        faults.plan_for_caches_of_8_bits()
        lone_rank.listen_to_nobody()
        if random_weights.are_enabled():
            model_parts.make_up_weights(random_weights.draw)
        end_like_this()
