"""Fused GPU kernels. Their results are those of the plain PyTorch expressions that they replace.

Triton is part of torch's CUDA builds, and compiles a kernel at its first call.
"""

import functools
import importlib.util
import os

import torch

# `off` in an engine's environment selects the plain expressions (bench.fused).
SWITCH = "PROOFLINE_FUSED"


@functools.cache
def is_on(device: torch.device) -> bool:
    """Returns True if this device uses the kernels, False if it uses the plain expressions."""
    return (
        device.type == "cuda"
        and os.environ.get(SWITCH) != "off"
        and importlib.util.find_spec("triton") is not None
    )
