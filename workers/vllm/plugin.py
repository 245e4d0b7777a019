"""What vLLM loads into every process that it starts: its entry point `vllm.general_plugins`,
see pyproject.toml.
"""

import os

from workers.endings import end_like_this
from workers.vllm.start import lifeline


def register() -> None:
    """Keeps vLLM's processes from starving all others on machines with few cores, and lets them end
    at once.

    Does nothing in a vLLM that is not a worker's.
    """
    if lifeline.VARIABLE in os.environ:
        from workers.vllm import compat

        compat.let_readers_sleep()
        end_like_this()
