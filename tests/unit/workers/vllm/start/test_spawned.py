"""What a process that vLLM spawns runs first."""

import gc
import multiprocessing
import sys

from workers.vllm import plugin
from workers.vllm.start.spawned import main_of_children


def test_a_spawned_process_looks_for_no_garbage_until_the_plugin_is_loaded() -> None:
    before = sys.modules["__main__"].__spec__
    with main_of_children(), multiprocessing.get_context("spawn").Pool(1) as pool:
        assert not pool.apply(gc.isenabled)
        pool.apply(plugin.register)
        assert pool.apply(gc.isenabled)
    assert sys.modules["__main__"].__spec__ is before
    assert gc.isenabled()
