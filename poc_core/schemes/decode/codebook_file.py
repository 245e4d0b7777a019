"""Reads the codebook file of decode proofs (protocol.md, section 8), and checks its sha256."""

import hashlib
from pathlib import Path

from poc_core.errors import SettingsError

POINTS = 16
DIM = 256

SHIPPED = Path(__file__).with_name("codebook.f32")
SHIPPED_SHA256 = "840ab5bdafdd257964843975c7e901761b143b93ac6b8d86d99345113f157c6b"
# sha256 of the network's file, which is not public. The shipped file differs by up to 2e-5.
NETWORK_SHA256 = "2201d1093583f43f328dd4643ddf1f34737f6da8c1956395c43fd093e357e34f"


def read_codebook_file(file: str = "") -> tuple[bytes, str]:
    """Returns a codebook file's content (POINTS x DIM little-endian float32) and sha256. If `file`
    is "", reads the shipped file. Raises SettingsError if the file is unreadable or unknown.
    """
    path = Path(file) if file else SHIPPED
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"The codebook {path} cannot be read ({error.strerror}).") from error
    digest = hashlib.sha256(raw).hexdigest()
    if digest not in (NETWORK_SHA256, SHIPPED_SHA256):
        remedy = (
            f"the network's own (POC_DECODE_CODEBOOK) has {NETWORK_SHA256}"
            if file
            else "it is damaged: reinstall Proofline"
        )
        raise SettingsError(f"The codebook {path} has the sha256 {digest}; {remedy}.")
    return raw, digest
