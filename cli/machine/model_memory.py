"""Checks whether a model's weights fit in memory before an engine spends minutes loading them."""

import os
from collections.abc import Sequence
from pathlib import Path

from api.models import files
from cli.machine.cgroup import memory_left
from cli.machine.gpus import memory_bytes
from cli.terminal import UsageError
from poc_core.machine_figures import is_short_of_memory

GB = 1e9
GIB = 2**30
# An engine process with its libraries, without a model.
PROCESS_GIB = 1.0
# With these arguments the loaded weights differ in size from the stored weights.
CHANGES_SIZE = ("--load-format", "--quantization", "-q", "--cpu-offload-gb", "--hf-overrides")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_fits(
    model: str,
    dtype: str,
    groups: Sequence[Sequence[str]],
    vllm_args: Sequence[str],
    share: float = 1.0,
) -> None:
    """Raises UsageError if a model's weights alone exceed the memory of a worker's GPUs.

    `groups`: each worker's GPUs. `share`: the part of the weights that this host loads. Does
    nothing if the size of the weights or of the memory is unknown.
    """
    if any(word.split("=", 1)[0] in CHANGES_SIZE for word in vllm_args):
        return
    weights = share * weights_bytes(Path(model), dtype)
    for group in groups:
        each = memory_bytes(group)
        if weights and each is not None and weights > each * len(group):
            raise UsageError(
                f"The weights of {model} take {weights / GB:.0f} GB and GPU(s) {','.join(group)}"
                f" have {each * len(group) / GB:.0f} GB: use more --tensor-parallel or"
                " --pipeline-parallel, or a smaller model."
            )


def short_of_memory(
    model: str, dtype: str, n_workers: int, n_ranks: int, kv_gib: str | None
) -> str | None:
    """Returns a warning if the workers need more memory than is left, otherwise None.

    `n_ranks`: processes per worker. `kv_gib`: GiB of KV cache per process on a CPU; None on GPUs.
    """
    needs = n_workers * n_ranks * PROCESS_GIB * GIB
    if kv_gib is not None:
        needs += n_workers * (weights_bytes(Path(model), dtype) + n_ranks * float(kv_gib) * GIB)
    try:
        left, limit = memory_left()
    except (OSError, ValueError):
        return None
    if needs <= left and not is_short_of_memory(left - needs, limit):
        return None
    return (
        f"memory is short: {n_workers} worker(s) need about {needs / GIB:.1f} GiB, and of"
        f" {limit / GIB:.1f} GiB {left / GIB:.1f} are left; the kernel may end an engine"
    )


def weights_bytes(directory: Path, dtype: str) -> int:
    """Returns the size of a model's weights in bytes when loaded as `dtype`; 0 if unreadable."""
    try:
        names = os.listdir(directory)
        stored, index = files.chosen(names)
        if index in names:
            stored &= files.indexed(directory / index)
        size = sum((directory / name).stat().st_size for name in stored)
        config = files.parsed(directory / "config.json") if size else {}
    except (OSError, files.BrokenModelError):
        return 0
    kept_as = BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 0)
    loaded_as = BYTES.get(dtype, min(kept_as, 2))  # auto: vLLM loads float32 as 16 bits
    return size * loaded_as // kept_as if kept_as else size
