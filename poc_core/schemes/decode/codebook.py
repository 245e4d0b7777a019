"""The codebook of decode proofs: 16 unit vectors, the points. A decode proof replaces a hidden
state by its nearest point (protocol.md, section 8).
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from poc_core.schemes.decode.codebook_file import DIM, POINTS, read_codebook_file


class _Chosen:
    """The path of the codebook file that this process uses; empty for the shipped file."""

    file = ""


def choose_codebook(file: str) -> str:
    """Sets this process's codebook file ("" for the shipped file). Returns the file's sha256.
    SettingsError if the file cannot be read, or is no known codebook.
    """
    digest = read_codebook_file(file)[1]
    _Chosen.file = file
    codebook.cache_clear()
    return digest


@cache
def codebook(device: torch.device) -> Tensor:
    """Returns the points of the codebook on a device: float32 (POINTS, DIM)."""
    raw, _digest = read_codebook_file(_Chosen.file)
    points = np.frombuffer(raw, "<f4").reshape(POINTS, DIM).astype(np.float32)
    return torch.from_numpy(points).to(device)
