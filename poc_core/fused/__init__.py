"""Fused kernels for GPUs, each with the same numbers as the plain expression beside it.

Triton comes with torch's CUDA build and compiles a kernel when it is first called.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

# `off` in an engine's environment: the plain expressions; bench.bits.fused_distance compares.
SWITCH = "PROOFLINE_FUSED"


@functools.cache
def is_on(device: torch.device) -> bool:
    """True if this device computes with the kernels; else the plain expressions do."""
    return (
        device.type == "cuda"
        and os.environ.get(SWITCH) != "off"
        and importlib.util.find_spec("triton") is not None
    )
