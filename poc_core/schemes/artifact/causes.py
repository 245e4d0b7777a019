"""Guesses why artifacts differ, from the pattern of their distances."""

import math
from collections.abc import Sequence

# Unrelated unit vectors are about sqrt(2) apart (docs/proofs.md). Rounding, formats and hardware
# move a vector by far less than half of that.
UNRELATED = math.sqrt(2) / 2

UNREADABLE = (
    "Their vectors cannot be read: not base64 of k_dim finite numbers of 16 bits. Another k_dim, or"
    " no vector at all."
)
OTHER_INPUTS = (
    "All lie apart as vectors of other inputs do: another block hash, public key, model, seq_len or"
    " kind of random numbers (poc_stronger_rng)."
)
SOME_MADE_UP = (
    "Some lie apart as vectors of other inputs do, and the rest agrees: these nonces were exchanged"
    " or invented."
)
LITTLE_APART = (
    "They lie apart by less than vectors of other inputs do: another number format, quantisation,"
    " hardware or release of the engine, or a threshold too strict for those (`proofline report`)."
)


def likely_cause(mismatches: Sequence[float | None], n_total: int) -> str:
    """Returns a sentence that explains why some of `n_total` compared vectors differ. `mismatches`:
    the L2 distance of each; None for a missing or unreadable vector.
    """
    read = [distance for distance in mismatches if distance is not None]
    if 2 * len(read) < len(mismatches):
        return UNREADABLE
    unrelated = sum(distance > UNRELATED for distance in read)
    if 2 * unrelated <= len(read):
        return LITTLE_APART
    return OTHER_INPUTS if 10 * len(mismatches) >= 9 * n_total else SOME_MADE_UP
