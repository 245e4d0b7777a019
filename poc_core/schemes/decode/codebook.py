"""The 16 points that decode proofs snap states to (protocol.md, section 8): data, not code."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from poc_core.schemes.decode.codebook_file import DIM, POINTS, read_codebook_file


class _Chosen:
    """This process's codebook, one for all specs."""

    file = ""


def choose_codebook(file: str) -> str:
    """Chooses this process's codebook; empty: the shipped one. Returns its sha256.

    SettingsError: see read_codebook_file.
    """
    digest = read_codebook_file(file)[1]
    _Chosen.file = file
    codebook.cache_clear()
    return digest


@cache
def codebook(device: torch.device) -> Tensor:
    """float32 (POINTS, DIM) on a device."""
    raw, _digest = read_codebook_file(_Chosen.file)
    return torch.from_numpy(np.frombuffer(raw, "<f4").reshape(POINTS, DIM).astype(np.float32)).to(
        device
    )
