"""Checks GPUs, their NVLink connections and their driver."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cli.examine.findings import Finding, Subject
from cli.machine.gpus import visible_gpus, vllm_needs_cuda, vllm_runs_on_cpu
from poc_core.gpus import Gpu, MachineGpus, nvml

_GPU, _DRIVER, _NVLINK, _NCCL = map(Subject, ("gpu", "driver", "nvlink", "nccl"))

_BUSY = 0.1  # a GPU is in use above this share of its memory; displays and drivers need less
_LINKS = 18  # most NVLinks of a GPU
_CPUINFO = Path("/proc/cpuinfo")


def gpus(machine: MachineGpus) -> Iterator[Finding]:
    """Checks each GPU and its free memory, and whether the installed vLLM can use GPUs."""
    if not machine.devices:
        if vllm_needs_cuda():
            yield _GPU.problem(
                "None is to be seen, and the vLLM installed here needs one.",
                "Look at nvidia-smi and, in a container, at its GPU reservation; or install the CPU"
                " build: make setup.",
            )
        else:
            yield _GPU.ok("none: proofs and chat are computed on the CPU")
        return
    if machine.driver is not None:
        version, cuda = machine.driver.driver_version, machine.driver.cuda_driver_version
        if cuda is None:
            yield _DRIVER.problem(
                f"{version}, without its library for CUDA (libcuda.so.1).",
                "In a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
            )
        else:
            yield _DRIVER.ok(f"{version}, for CUDA up to {cuda}")
    if vllm_runs_on_cpu():
        yield _GPU.warning(
            "The vLLM installed here is a CPU build, which leaves them alone.", "make setup-gpu"
        )
    for device in machine.devices:
        yield _gpu(device)
    shown = visible_gpus()
    if len(shown) < len(machine.devices):
        yield _GPU.warning(
            f"CUDA_VISIBLE_DEVICES shows {len(shown)} of {len(machine.devices)}.",
            "Unset it, unless the others are somebody else's.",
        )


def _gpu(device: Gpu) -> Finding:
    subject = Subject(f"gpu {device.index}")
    if not device.is_available:
        return subject.problem(
            f"Does not answer: {device.error_message}",
            "nvidia-smi shows details; restart the machine.",
        )
    free, total = device.free_memory_mb or 0, device.total_memory_mb or 0
    text = f"{device.name}, {free / 1024:.0f} of {total / 1024:.0f} GiB free"
    if total and free < total * (1 - _BUSY):
        return subject.warning(
            f"{text}: something uses it.",
            "nvidia-smi shows the process. Unless it is a worker of Proofline, end it: a worker"
            " needs nearly all of the GPU's memory.",
        )
    return subject.ok(text)


def nvlink(machine: MachineGpus, group_size: int) -> Iterator[Finding]:
    """Checks whether NVLink connects the GPUs. `group_size`: number of GPUs that share a model."""
    if len(machine.devices) < 2:
        return
    links = [_links(device.index) for device in machine.devices]
    if None in links:
        return
    if all(links):
        yield _NVLINK.ok(f"{min(link or 0 for link in links)} links or more at each GPU")
    elif group_size > 1:
        yield _NVLINK.warning(
            "There is none between all GPUs, so what tensor parallelism sends goes over PCIe.",
            "--pipeline-parallel instead, or one worker for each GPU where the model fits:"
            " `proofline bench` tells.",
        )
    else:
        yield _NVLINK.ok("none; one worker for each GPU needs none")


def multicast(machine: MachineGpus, cpuinfo: Path = _CPUINFO) -> Iterator[Finding]:
    """Warns about NVLink multicast in a virtual machine if NCCL_NVLS_ENABLE is not 0."""
    if len(machine.devices) < 2 or os.environ.get("NCCL_NVLS_ENABLE") == "0":
        return
    if _is_virtual(cpuinfo):
        yield _NCCL.warning(
            "In a virtual machine NVLink's multicast may seem to work but fail: workers with"
            " several GPUs then end at their start with `NCCL error: unhandled cuda error`.",
            "Start the node with NCCL_NVLS_ENABLE=0.",
        )


def _is_virtual(cpuinfo: Path) -> bool:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "hypervisor" in flags


def _links(index: int) -> int | None:
    with nvml() as library:
        if library is None:
            return None
        handle = library.nvmlDeviceGetHandleByIndex(index)
        return sum(_is_active(library, handle, link) for link in range(_LINKS))


def _is_active(library: Any, handle: Any, link: int) -> bool:
    try:
        return bool(library.nvmlDeviceGetNvLinkState(handle, link))
    except library.NVMLError:  # this GPU has fewer links
        return False


def group_of(machine: MachineGpus, size: int) -> Sequence[Gpu]:
    """Returns the GPUs of the first worker: the first `size` visible GPUs."""
    shown = visible_gpus()
    found = [gpu for gpu in machine.devices if str(gpu.index) in shown or gpu.uuid in shown]
    return found[:size]
