"""Kernels in Gluon compile for Hopper with the installed Triton, whose language Gluon changes from
release to release. On a GPU their bits are held against vLLM's (test_quick_marlin and
test_quick_block_experts)."""

import subprocess
import sys
from typing import Any

import pytest


def compiled(kernel: Any, options: dict[str, Any], pointers: dict[str, str]) -> None:
    """Runs in a process of its own: Gluon prints about its own leaks when a process ends."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kinds = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(options, "constexpr") | pointers
    other = {*options, "n_ids", "n_rows", *(at for at, kind in kinds.items() if "desc" in kind)}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in other
    }
    source = GluonASTSource(kernel, kinds, options, aligned)
    given = {"num_warps": 4, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=given)
    assert "wgmma.mma_async" in made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024, "a Hopper multiprocessor has less"


def check(steps: tuple[int, ...], opens: tuple[bool, ...]) -> None:
    from triton.experimental.gluon import language as gl

    from workers.vllm.kernels.block_down import _down_kernel
    from workers.vllm.kernels.block_gates import _gates_kernel
    from workers.vllm.kernels.marlin_products import _product_kernel

    options = {"A_TOKEN": 6, "LIMIT": 10.0, "PROGRAMS": 132}
    integers = dict.fromkeys(("ids", "experts", "n_ids"), "*i32")
    pointers = dict.fromkeys(("x", "out", "share"), "*bf16") | {"words": "*i32", "scales": "*i32"}
    for one in opens:
        compiled(_product_kernel, options | {"OPENS": one}, integers | pointers)
    pointers = dict.fromkeys(("x_scales", "scales", "out_scales"), "*fp32")
    pointers |= {"x": "*fp8e4nv", "out": "*fp8e4nv"}
    layout = gl.NVMMASharedLayout(128, 8, 2)
    pointers["weights"] = f"tensordesc<fp8e4nv[128, 128],{layout!r}>"
    compiled(_gates_kernel, options, integers | pointers)
    pointers |= {"x": pointers["weights"], "out": "*bf16", "share": "*fp32"}
    del pointers["out_scales"]
    for n in steps:
        compiled(_down_kernel, {"STEPS": n, "PROGRAMS": 132}, integers | pointers)


# A compilation takes seconds: `make test` has one of each kernel, the largest.
@pytest.mark.parametrize(
    ("steps", "opens"),
    [((8,), (True,)), pytest.param((8, 6, 4), (True, False), marks=pytest.mark.slow)],
)
def test_kernels_compile_for_hopper(steps: tuple[int, ...], opens: tuple[bool, ...]) -> None:
    pytest.importorskip("triton")
    code = f"from {__name__} import check; check({steps}, {opens})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
