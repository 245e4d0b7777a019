"""The switch of the fused GPU kernels in Triton. Fused kernels replace PyTorch expressions and
operations of vLLM, with the same results up to rounding.

Triton is part of torch's CUDA builds. It compiles a kernel when the kernel is first called.
"""

import functools
import importlib.util
import os

import torch

# `off` in an engine's environment selects the plain expressions (bench.fused).
SWITCH = "PROOFLINE_FUSED"


@functools.cache
def is_on(device: torch.device) -> bool:
    """Returns True if the fused kernels are used for tensors on this device.

    Returns False if the device is no CUDA device, if Triton is not installed, or if the environment
    has PROOFLINE_FUSED=off. Plain PyTorch expressions are then used instead.
    """
    return (
        device.type == "cuda"
        and os.environ.get(SWITCH) != "off"
        and importlib.util.find_spec("triton") is not None
    )
