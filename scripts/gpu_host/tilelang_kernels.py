"""Compiles the TileLang kernels of DeepSeek-V4-Flash and GLM-5.3-Flash before vLLM 0.30 starts.

vLLM itself compiles one kernel after the other at its first start, which takes minutes.

    python -m scripts.gpu_host.tilelang_kernels --jobs 14            # on the GPU host
    python -m scripts.gpu_host.tilelang_kernels --jobs 2 --pretend   # anywhere, for a Hopper GPU

Fills TILELANG_CACHE_DIR, which can be copied to another host: a kernel's key has its source, its
constants, the GPU's architecture and TileLang's release, but no path and no release of Python.
--pretend needs the CUDA build of vLLM and nvcc, but no GPU. Failures are printed.
"""

import argparse
import importlib
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

# vLLM's module with all TileLang kernels.
MODULE = "vllm.model_executor.kernels.mhc.tilelang_kernels"
# Tokens of a step; steps with fewer tokens use a subset of the kernels.
MOST_TOKENS = 16_384
MULTIPROCESSORS = 132  # of an H100 and an H200


class Connections(NamedTuple):
    """The hyper-connections of a model."""

    hidden: int
    norm_eps: float
    rounds: int  # of Sinkhorn's iteration
    of_deepseek: bool  # which has two kernels more
    streams: int = 4
    eps: float = 1e-6


MODELS = {
    "deepseek-v4-flash": Connections(4096, 1e-6, 20, True),
    "glm-5.3-flash": Connections(4096, 1e-5, 20, False),
    # Of bench/families.
    "tiny-deepseek-v4": Connections(2048, 1e-6, 4, True),
    "tiny-glm-5.3-flash": Connections(2048, 1e-5, 4, False),
}


def pretend() -> None:
    """Simulates a Hopper GPU for vLLM and TileLang."""
    import torch

    gpu = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=MULTIPROCESSORS,
        total_memory=140 << 30,
    )  # fmt: skip
    said = {
        "is_available": True, "device_count": 1, "current_device": 0,
        "get_device_capability": (9, 0), "get_device_properties": gpu, "get_device_name": gpu.name,
    }  # fmt: skip
    for name, value in said.items():
        setattr(torch.cuda, name, lambda *_args, value=value: value)
    for name in ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")  # they want a driver
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    vars(platforms)["_current_platform"] = cuda.NonNvmlCudaPlatform()


def kernels(of: Connections) -> Iterator[tuple[Any, Any]]:
    """Yields each kernel of a model and the key of its constants."""
    module: Any = importlib.import_module(MODULE)
    scheduler = types.SimpleNamespace(max_num_batched_tokens=MOST_TOKENS)
    shape: dict[str, Any] = {"hidden_size": of.hidden, "hc_mult": of.streams}
    sized = shape | {"vllm_config": types.SimpleNamespace(scheduler_config=scheduler)}
    eps = of.norm_eps
    before = sized | {
        "use_norm_weight": True, "include_pre_gemm_splits": True,
        "include_broadcast_splits": of.of_deepseek, "rms_eps": eps, "hc_pre_eps": of.eps,
        "hc_sinkhorn_eps": of.eps, "hc_post_mult_value": 2.0, "sinkhorn_repeat": of.rounds,
        "norm_eps": (eps, eps),
    }  # fmt: skip
    wanted = {
        "_HC_PRENORM_GEMM_TILELANG_KERNEL": sized | {"n_out": of.streams * (2 + of.streams)},
        "_MHC_POST_TILELANG_KERNEL": shape,
        "_MHC_FUSED_TILELANG_KERNEL": sized,
    }
    if of.of_deepseek:
        before["broadcast_norm_eps"] = eps
        wanted["_HC_HEAD_FUSED_TILELANG_KERNEL"] = shape | {"rms_eps": eps, "hc_eps": of.eps}
    for name, constants in {"_MHC_PRE_BIG_FUSE_TILELANG_KERNEL": before, **wanted}.items():
        kernel = getattr(module, name)
        for key in dict.fromkeys(kernel.get_warmup_keys(**constants)):
            yield kernel, key


def compile_part(given: argparse.Namespace) -> int:
    """Compiles the kernels of one of several processes; returns the number of failures."""
    if given.pretend:
        pretend()
    failed = 0
    every = [(name, *one) for name in given.model or MODELS for one in kernels(MODELS[name])]
    for name, kernel, key in every[given.part :: given.jobs]:
        began = time.perf_counter()
        try:
            kernel.compile(key)
            outcome = "ready"
        except Exception as error:  # the others may still be had
            failed, outcome = failed + 1, f"FAILED: {error}"
        took_s = time.perf_counter() - began
        print(f"{took_s:6.1f} s {name} {type(kernel).__name__} {key}: {outcome}", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--pretend", action="store_true", help="as if there were a Hopper GPU")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of a child
    given = parser.parse_args()
    if given.part is not None:
        raise SystemExit(compile_part(given) > 0)
    command = [sys.executable, "-m", "scripts.gpu_host.tilelang_kernels", *sys.argv[1:]]
    command += ["--jobs", str(given.jobs), "--part"]
    children = [subprocess.Popen([*command, str(part)]) for part in range(given.jobs)]
    codes = [child.wait() for child in children]
    raise SystemExit(any(codes))


if __name__ == "__main__":
    main()
