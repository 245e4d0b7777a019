"""Pseudorandom numbers for synthetic values, which prove nothing."""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def noise(spec: str, nonce: int, size: int) -> "np.ndarray":
    """Returns `size` pseudorandom numbers in [-1, 1): a hash of `spec` (JSON) and `nonce`, as
    float64.
    """
    import numpy as np  # here: it takes 25 MB, which most API processes do not need

    digest = hashlib.shake_128(f"synthetic|{spec}|{nonce}".encode()).digest(2 * size)
    return np.frombuffer(digest, dtype="<i2") / 32768
