"""Assigns CPUs to vLLM's processes on machines without GPUs. By default vLLM assigns a NUMA node to
each rank, so two workers on one machine would use the same CPUs.
"""

import os
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
# vLLM's variable: "0-3|4-7" for two ranks, "nobind" or "auto"

_NODES = Path("/sys/devices/system/node")


def divide(n_ranks: int) -> None:
    """Divides this process's CPUs among vLLM's ranks, unless the operator has set
    VLLM_CPU_OMP_THREADS_BIND, there is only one rank, or each rank has a NUMA node.
    """
    if n_ranks == 1 or VARIABLE in os.environ or len(list(_NODES.glob("node[0-9]*"))) >= n_ranks:
        return
    if hasattr(os, "sched_getaffinity"):
        os.environ[VARIABLE] = shares(sorted(os.sched_getaffinity(0)), n_ranks)


def environment_of_worker(index: int, n_workers: int, n_ranks: int) -> dict[str, str]:
    """Returns the variables that give one of several workers its share of the CPUs; {} for a single
    worker, or if the operator has set VLLM_CPU_OMP_THREADS_BIND.
    """
    if n_workers == 1 or VARIABLE in os.environ or not hasattr(os, "sched_getaffinity"):
        return {}
    cpus = sorted(os.sched_getaffinity(0))
    size = len(cpus) // n_workers
    own = cpus[index * size : (index + 1) * size]
    if len(own) > n_ranks:  # one CPU is left for the worker's other processes, as in vLLM
        own = own[:-1]
    return {VARIABLE: shares(own, n_ranks)}


def shares(cpus: Sequence[int], n_ranks: int) -> str:
    """Returns a VLLM_CPU_OMP_THREADS_BIND with equally many CPUs per rank; "nobind" if too few."""
    size = len(cpus) // n_ranks
    if size == 0:
        return "nobind"
    return "|".join(
        ",".join(map(str, cpus[rank * size : (rank + 1) * size])) for rank in range(n_ranks)
    )
