"""The 16 points that a decode proof snaps its states to (protocol.md, section 8): data, never computed anew."""

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from poc_core.errors import ProoflineError

POINTS = 16
DIM = 256

SHIPPED = Path(__file__).with_name("codebook.f32")
# Of the shipped bytes. The network's own file (2201d109...) is not public; rebuilds differ by up to 2e-5 an entry.
SHIPPED_SHA256 = "840ab5bdafdd257964843975c7e901761b143b93ac6b8d86d99345113f157c6b"


def read_codebook(path: Path = SHIPPED) -> tuple[Tensor, str]:
    """(float32 (POINTS, DIM), the sha256 of its bytes) of a file of little-endian float32. ProoflineError: it is none,
    or the shipped one is damaged."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ProoflineError(f"The codebook {path} cannot be read ({error.strerror}).") from error
    points, digest = np.frombuffer(raw, "<f4") if len(raw) % 4 == 0 else np.empty(0), hashlib.sha256(raw).hexdigest()
    if points.size != POINTS * DIM or not np.isfinite(points).all():
        raise ProoflineError(f"{path} is no codebook: it must hold {POINTS} x {DIM} finite float32 numbers.")
    if path == SHIPPED and digest != SHIPPED_SHA256:
        raise ProoflineError(f"{path} is damaged: its sha256 is {digest}; install Proofline anew.")
    return torch.from_numpy(points.reshape(POINTS, DIM).astype(np.float32)), digest


@cache
def codebook(device: torch.device) -> Tensor:
    """The shipped one on a device."""
    return read_codebook()[0].to(device)
