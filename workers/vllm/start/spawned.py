"""The main module of the processes that vLLM spawns. Runs in them before vLLM is imported."""

import gc
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

if __name__ == "__mp_main__":
    # Collection would take a quarter of the time of imports; our vLLM plugin enables it again.
    gc.disable()


@contextmanager
def main_of_children() -> Iterator[None]:
    """Makes this module the main module of processes spawned inside the context, which then skip
    our command's imports. Changes nothing without our vLLM plugin, or if VLLM_PLUGINS is set.
    """
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="proofline")
    if not plugins or "VLLM_PLUGINS" in os.environ:
        yield
        return
    main = sys.modules["__main__"]
    before, main.__spec__ = main.__spec__, importlib.util.find_spec(__name__)
    try:
        yield
    finally:
        main.__spec__ = before
