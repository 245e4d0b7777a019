"""The codebook: the 16 points to which decode proofs snap states (protocol.md, section 8)."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from poc_core.schemes.decode.codebook_file import DIM, POINTS, read_codebook_file


class _Chosen:
    """The path of the codebook file that this process uses; empty for the shipped file."""

    file = ""


def choose_codebook(file: str) -> str:
    """Sets the codebook file of this process; empty for the shipped file. Returns its sha256.

    SettingsError: see read_codebook_file.
    """
    digest = read_codebook_file(file)[1]
    _Chosen.file = file
    codebook.cache_clear()
    return digest


@cache
def codebook(device: torch.device) -> Tensor:
    """Returns the codebook on a device: float32 (POINTS, DIM)."""
    raw, _digest = read_codebook_file(_Chosen.file)
    points = np.frombuffer(raw, "<f4").reshape(POINTS, DIM).astype(np.float32)
    return torch.from_numpy(points).to(device)
