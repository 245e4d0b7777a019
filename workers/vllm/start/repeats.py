"""Distinguishes an engine with irreproducible results from an engine that computes wrongly. Some
kernels add numbers in the order in which their threads finish: sparse attention when it selects
tokens, and some mixtures of experts.
"""

import logging
import math
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from pydantic import JsonValue

from poc_core.arithmetic.encoding import decode_vector
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.options import ArtifactOptions
from workers.engines.base import Engine
from workers.pipeline import compute_all

logger = logging.getLogger(__name__)

# Factor by which a run may exceed the spread of identical runs before it counts as different.
_MARGIN = 3.0
_REPEATS = 3


def as_near_as_repeats(
    engine: Engine,
    spec: ProofSpec,
    nonces: Sequence[int],
    expected: list[JsonValue],
    compute: Callable[[], list[JsonValue] | None],
) -> bool:
    """Returns True if another way of computing gives the engine's artifacts: bit for bit, or about
    as close as repeated runs of the engine are to each other. Both ways run several times, because
    perhaps only one run in five differs. One bit-identical run is enough.

    `expected`: the engine's artifacts. `compute`: returns artifacts computed in the other way, or
    None if that way is impossible.
    """
    seen = compute()
    if seen is None or seen == expected:
        return seen is not None
    own = [expected, *(compute_all(engine, spec, nonces) for _ in range(_REPEATS))]
    if any(one in own for one in chain([seen], (compute() for _ in range(_REPEATS)))):
        return True
    k_dim = ArtifactOptions.of(spec).k_dim
    again = max(_apart(one, expected, k_dim) for one in own)
    apart = _apart(seen, expected, k_dim)
    if again:
        logger.info(
            "values of %s differ by %.4f each time, and here by %.4f",
            engine.info.name,
            again,
            apart,
        )
    return apart <= _MARGIN * again < math.inf


def _apart(values: list[JsonValue], others: list[JsonValue], k_dim: int) -> float:
    """Returns the largest L2 distance between corresponding artifacts of two runs. Infinite if only
    one of the runs has an artifact for some nonce.
    """
    pairs = [pair for pair in zip(values, others, strict=True) if pair[0] != pair[1]]
    if any(None in pair for pair in pairs):
        return math.inf
    vectors = [[decode_vector(str(value), k_dim) for value in pair] for pair in pairs]
    return max((float(np.linalg.norm(one - two)) for one, two in vectors), default=0.0)
