"""Numbers for synthetic values, which are derived only from spec and nonce and prove nothing."""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def noise(spec: str, nonce: int, size: int) -> "np.ndarray":
    """Returns float64 (size,) in [-1, 1), from a hash of a spec's JSON and the nonce."""
    import numpy as np  # here: it takes 25 MB, which most API processes do not need

    digest = hashlib.shake_128(f"synthetic|{spec}|{nonce}".encode()).digest(2 * size)
    return np.frombuffer(digest, dtype="<i2") / 32768
