"""The file that the points of decode proofs come from (protocol.md, section 8): its bytes, and
which they must be.
"""

import hashlib
import math
import struct
from pathlib import Path

from poc_core.errors import SettingsError

POINTS = 16
DIM = 256

SHIPPED = Path(__file__).with_name("codebook.f32")
# Of the shipped bytes. The network's own file (2201d109...) is not public; rebuilds differ by up to
# 2e-5 an entry.
SHIPPED_SHA256 = "840ab5bdafdd257964843975c7e901761b143b93ac6b8d86d99345113f157c6b"

# How far the length of a row may lie from 1: float32's rounding is far below.
_LENGTH_TOLERANCE = 1e-3


def read_codebook_file(file: str = "", sha256: str = "") -> tuple[bytes, str]:
    """(POINTS x DIM little-endian float32, their sha256) of a file, or what ships where none is
    named.

    `sha256`: in hexadecimal, of all its bytes. SettingsError: it is another file, or no codebook.
    """
    path, wanted = Path(file) if file else SHIPPED, sha256.strip().lower()
    if bool(file) != bool(wanted):
        raise SettingsError(
            "POC_DECODE_CODEBOOK and POC_DECODE_CODEBOOK_SHA256 go together: a file, and the sha256"
            " that it must have."
        )
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"The codebook {path} cannot be read ({error.strerror}).") from error
    digest = hashlib.sha256(raw).hexdigest()
    if file and digest != wanted:
        raise SettingsError(
            f"The codebook {path} is not the one that is meant: its sha256 is {digest}, "
            f"POC_DECODE_CODEBOOK_SHA256 says {wanted}."
        )
    if not file and digest != SHIPPED_SHA256:
        raise SettingsError(f"{path} is damaged: its sha256 is {digest}; install Proofline anew.")
    if len(raw) != 4 * POINTS * DIM or not all(map(_is_unit, struct.iter_unpack(f"<{DIM}f", raw))):
        raise SettingsError(
            f"{path} is no codebook: it must hold {POINTS} rows of {DIM} float32 numbers, of"
            " length 1."
        )
    return raw, digest


def _is_unit(row: tuple[float, ...]) -> bool:
    return abs(math.hypot(*row) - 1) <= _LENGTH_TOLERANCE  # False for what is not finite
