"""Proof vectors as text: float16, little-endian, base64 (protocol.md, section 2.6)."""

import base64
import binascii

import numpy as np
import numpy.typing as npt

from poc_core.errors import VectorError


def encode_vectors(vectors: npt.NDArray[np.floating]) -> list[str]:
    """Encodes each row of `vectors` (n, k_dim) as float16, little-endian, in base64. Returns one
    `vector_b64` per row.
    """
    return [base64.b64encode(row.tobytes()).decode("ascii") for row in vectors.astype("<f2")]


def decode_vector(vector_b64: str, k_dim: int) -> npt.NDArray[np.float32]:
    """Decodes a `vector_b64` to its numbers: float32 (k_dim,).

    VectorError if the text is not base64, or does not hold exactly k_dim finite float16 numbers.
    """
    try:
        raw = base64.b64decode(vector_b64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise VectorError(f"vector_b64 is not base64 ({error}).") from None
    if len(raw) != 2 * k_dim:
        raise VectorError(
            f"vector_b64 holds {len(raw)} bytes, but {k_dim} float16 numbers take {2 * k_dim}."
        )
    vector = np.frombuffer(raw, dtype="<f2")
    if not np.isfinite(vector).all():  # before the cast, which would warn of a signalling NaN
        raise VectorError("vector_b64 holds a NaN or an infinity; all its numbers must be finite.")
    return vector.astype(np.float32)
