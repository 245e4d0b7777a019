"""Checks whether a model's weights fit in memory, before an engine spends minutes on loading."""

import os
from collections.abc import Sequence
from pathlib import Path

from api.models.files import BrokenModelError, chosen, indexed, parsed
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
    """Raises UsageError if the weights alone exceed a worker's GPUs. Unknown sizes pass.

    `share`: the part of the weights on this host's group; other hosts hold the rest.
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
    """Returns a warning if workers need more memory than this machine has left; None if not.

    `n_ranks`: processes of each worker. `kv_gib`: GiB per process for chat's KV cache on a CPU;
    None on GPUs, which hold weights and cache.
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
    """Returns the bytes of a model's loaded weights; 0 if `directory` contains no model."""
    try:
        names = os.listdir(directory)
        stored, index = chosen(names)
        if index in names:
            stored &= indexed(directory / index)
        size = sum((directory / name).stat().st_size for name in stored)
        config = parsed(directory / "config.json") if size else {}
    except (OSError, BrokenModelError):
        return 0
    kept_as = BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 0)
    loaded_as = BYTES.get(dtype, min(kept_as, 2))  # auto: vLLM loads float32 as 16 bits
    return size * loaded_as // kept_as if kept_as else size
