"""Guesses why artifacts differ, from the pattern of their distances."""

import math
from collections.abc import Sequence

# Unrelated unit vectors are about sqrt(2) apart (docs/proofs.md). Rounding, formats and hardware
# move a vector by far less than half of that.
UNRELATED = math.sqrt(2) / 2

UNREADABLE = (
    "The vectors cannot be read, because they are not base64 of k_dim finite 16-bit numbers:"
    " another k_dim, or missing vectors."
)
OTHER_INPUTS = (
    "All vectors differ as if computed from other inputs: another block hash, public key, model,"
    " seq_len or poc_stronger_rng."
)
SOME_MADE_UP = (
    "Some vectors differ as if computed from other inputs, and the others agree: some nonces were"
    " exchanged or their vectors fabricated."
)
LITTLE_APART = (
    "The vectors differ less than vectors of other inputs: another number format, quantization,"
    " hardware or engine release, or a threshold too strict for these (`proofline report`)."
)


def likely_cause(mismatches: Sequence[float | None], n_total: int) -> str:
    """Returns a sentence that explains why some of `n_total` compared vectors differ. `mismatches`:
    the L2 distance of each differing vector; None for a missing or unreadable vector.
    """
    read = [distance for distance in mismatches if distance is not None]
    if 2 * len(read) < len(mismatches):
        return UNREADABLE
    unrelated = sum(distance > UNRELATED for distance in read)
    if 2 * unrelated <= len(read):
        return LITTLE_APART
    return OTHER_INPUTS if 10 * len(mismatches) >= 9 * n_total else SOME_MADE_UP
