"""Copies to shared memory, for Gluon kernels in which one group of warps copies for the others."""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from workers.vllm.kernels.quantise import GROUP

# Copies by the threads of a group, and copies of boxes by the tensor memory accelerator. Triton 3.9
# changed both names.
copy = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
copy_box = getattr(tma, "async_load", tma.async_copy_global_to_shared)


@gluon.jit
def signal_step_before(full, step, IN_FLIGHT: gl.constexpr):
    """Waits for the copies of the step before `step`, and signals them at that step's barrier.

    `full`: a barrier for each step in shared memory. `IN_FLIGHT`: 1 if the copies of `step` were
    started, 0 after the last step.
    """
    STAGES: gl.constexpr = full.shape[0]
    async_copy.wait_group(IN_FLIGHT)
    fence_async_shared()
    mbarrier.arrive(full.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)


def boxes_of(numbers: Tensor) -> Any:
    """Returns a tensor descriptor, by which the tensor memory accelerator reads `numbers` (n, k),
    in 8 bits, in boxes of GROUP x GROUP.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(GROUP, 8, 2)
    return TensorDescriptor.from_tensor(numbers, [GROUP, GROUP], layout)
