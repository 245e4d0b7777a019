"""The main module of the processes that vLLM spawns: run there before vLLM is imported."""

import gc
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

if __name__ == "__mp_main__":
    # Imports make no garbage, and looking for some takes a quarter of their time. The plugin, which
    # vLLM loads after them, ends this.
    gc.disable()


@contextmanager
def main_of_children() -> Iterator[None]:
    """Within: a spawned process has this module for its main one, not that of the command, whose
    imports nobody needs there.
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
