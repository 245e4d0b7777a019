"""Assigns GPUs, or CPU cores and memory, to each worker, by environment variables."""

import os
from collections.abc import Mapping, Sequence

from cli.machine import model_memory
from cli.machine.cpu_memory import VARIABLE, kv_cache_environment
from cli.machine.gpus import (
    GpuError,
    groups_of_gpus,
    groups_of_most,
    pinned_to,
    visible_gpus,
    vllm_needs_cuda,
    vllm_runs_on_cpu,
)
from workers.engines.options import EngineOptions
from workers.vllm.start import cpu_threads


def wants_gpus(options: EngineOptions) -> bool:
    return options.engine != "synthetic" and not (options.engine == "vllm" and vllm_runs_on_cpu())


def groups_for(options: EngineOptions, workers: int) -> list[list[str]]:
    """Returns each worker's GPUs; [] if no GPUs are used. Raises GpuError if there are too few."""
    gpus = visible_gpus() if wants_gpus(options) else []
    return groups_of_gpus(gpus, workers, options.n_devices) if gpus else []


def environments_of_most(
    options: EngineOptions, gpus: list[str], at_most: int | None, without_gpus: int
) -> list[dict[str, str]]:
    """Returns each worker's environment variables, for as many workers as the GPUs suffice for.

    `at_most`: limits the workers on GPUs. `without_gpus`: the number of workers if no GPUs are
    used. Raises UsageError.
    """
    groups = (
        groups_of_most(gpus, options.n_devices_here, at_most)
        if gpus and wants_gpus(options)
        else []
    )
    return environments(options, groups, len(groups) or without_gpus)


def environments(
    options: EngineOptions, groups: Sequence[Sequence[str]], workers: int
) -> list[dict[str, str]]:
    """Returns each worker's environment variables.

    `groups`: each worker's GPUs; [] for `workers` workers without GPUs. Raises UsageError if the
    weights exceed a group's memory, or if vLLM needs GPUs and there are none.
    """
    if groups:
        share = options.n_devices_here / options.n_devices
        model_memory.check_fits(options.model, options.dtype, groups, options.vllm_args, share)
        return [pinned_to(group) for group in groups]
    if options.engine != "vllm":
        return [{} for _ in range(workers)]
    if vllm_needs_cuda():
        raise GpuError(
            "The vLLM installed here needs a GPU and this machine shows none: look at nvidia-smi,"
            " at CUDA_VISIBLE_DEVICES and, in a container, at its GPU reservation; or install the"
            " CPU build."
        )
    n_ranks = options.n_devices_here
    memory = kv_cache_environment(options.model, workers * n_ranks)
    if not vllm_runs_on_cpu():
        return [memory] * workers
    return [memory | cpu_threads.environment_of_worker(i, workers, n_ranks) for i in range(workers)]


def short_of_memory(options: EngineOptions, places: Sequence[Mapping[str, str]]) -> str | None:
    """Returns a warning if these workers need more memory than this machine has left, else None."""
    if options.engine == "synthetic":
        return None
    on_cpu = options.engine == "vllm" and vllm_runs_on_cpu()
    kv_gib = {**os.environ, **(places[0] if places else {})}.get(VARIABLE) if on_cpu else None
    return model_memory.short_of_memory(
        options.model, options.dtype, len(places), options.n_devices_here, kv_gib
    )
