"""Chooses how much memory vLLM reserves on a CPU for the KV cache of chat.

By default vLLM's CPU backend reserves 92 % of the machine's memory, and refuses to start if less is
free. This fails on a machine that also runs Redis, an API or a second worker.
"""

import os
from contextlib import suppress
from pathlib import Path

from cli.machine.cgroup import memory_left
from cli.machine.gpus import visible_gpus, vllm_runs_on_cpu
from cli.shipped import shipped_models

VARIABLE = "VLLM_CPU_KVCACHE_SPACE"  # vLLM's variable: GiB for each of its processes
# Share of the free memory for all processes together; weights and activations need the rest.
SHARE = 0.25
LEAST_GIB = 1  # plenty for the shipped models
MOST_GIB = 4  # the default of earlier vLLM releases
GIB = 1024**3


def kv_cache_environment(model: str, processes: int) -> dict[str, str]:
    """Returns {VARIABLE: GiB per vLLM process}; {} on GPUs, or if VARIABLE is set already."""
    if VARIABLE in os.environ or (visible_gpus() and not vllm_runs_on_cpu()):
        return {}
    if Path(model) in shipped_models().values():
        return {VARIABLE: str(LEAST_GIB)}
    gib = int(available_bytes() * SHARE / processes / GIB)
    return {VARIABLE: str(min(MOST_GIB, max(LEAST_GIB, gib)))}


def available_bytes() -> int:
    with suppress(OSError, ValueError):
        return memory_left()[0]
    return 0
