"""The kernel for experts in 4 bits compiles for Hopper with the installed Triton, whose language
Gluon changes from release to release. On a GPU its bits are held against Marlin's
(test_quick_marlin)."""

import subprocess
import sys

import pytest


def check(opens: bool) -> None:
    """Runs in a process of its own: Gluon prints about its own leaks when a process ends."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from poc_core.fused.marlin_products import _product_kernel

    options = {"A_TOKEN": 6, "OPENS": opens, "LIMIT": 10.0, "PROGRAMS": 132}
    kinds = dict.fromkeys(_product_kernel.arg_names, "i32") | dict.fromkeys(options, "constexpr")
    kinds |= dict.fromkeys(("x", "out", "share"), "*bf16")
    kinds |= dict.fromkeys(("words", "scales", "ids", "experts", "n_ids"), "*i32")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kinds)
        if name not in options and name not in {"n_ids", "n_rows"}
    }
    source = GluonASTSource(_product_kernel, kinds, options, aligned)
    given = {"num_warps": 4, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=given)
    assert "wgmma.mma_async" in made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024, "a Hopper multiprocessor has less"


@pytest.mark.parametrize("opens", [True, False])
def test_the_kernel_compiles_for_hopper(opens: bool) -> None:
    pytest.importorskip("triton")
    code = f"from {__name__} import check; check({opens})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
