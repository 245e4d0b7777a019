"""Fused kernels for GPUs, each the same numbers as the plain expression beside which it stands.

Triton comes with torch's CUDA build and compiles a kernel when it is first called.
"""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def is_on(device: torch.device) -> bool:
    """Whether this device computes with the kernels; else the plain expressions do."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
