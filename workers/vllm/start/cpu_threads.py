"""Which CPUs each of vLLM's processes computes on, where it runs on CPUs.

Left alone, vLLM gives each rank a NUMA node of its own and refuses to start more ranks than the
machine has nodes; and two workers on one machine would compute on the very same CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
# vLLM's own: "0-3|4-7" for two ranks, "nobind" or "auto"

_NODES = Path("/sys/devices/system/node")


def divide(n_ranks: int) -> None:
    """Shares this process's CPUs out among `n_ranks` ranks, unless the user has or vLLM can."""
    if n_ranks == 1 or VARIABLE in os.environ or len(list(_NODES.glob("node[0-9]*"))) >= n_ranks:
        return
    if hasattr(os, "sched_getaffinity"):
        os.environ[VARIABLE] = shares(sorted(os.sched_getaffinity(0)), n_ranks)


def environment_of_worker(index: int, n_workers: int, n_ranks: int) -> dict[str, str]:
    """Environment for worker `index` of `n_workers`: CPUs that no other worker computes on.

    Empty for a single worker, and where the user has chosen.
    """
    if n_workers == 1 or VARIABLE in os.environ or not hasattr(os, "sched_getaffinity"):
        return {}
    cpus = sorted(os.sched_getaffinity(0))
    size = len(cpus) // n_workers
    own = cpus[index * size : (index + 1) * size]
    if len(own) > n_ranks:  # one is left for the worker's other processes, as vLLM itself does
        own = own[:-1]
    return {VARIABLE: shares(own, n_ranks)}


def shares(cpus: Sequence[int], n_ranks: int) -> str:
    """The value of VARIABLE: equal runs of neighbouring CPUs; "nobind" with fewer than ranks."""
    size = len(cpus) // n_ranks
    if size == 0:
        return "nobind"
    return "|".join(
        ",".join(map(str, cpus[rank * size : (rank + 1) * size])) for rank in range(n_ranks)
    )
