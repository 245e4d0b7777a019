"""Measures how far artifacts of the same nonces lie apart if they were computed in two different
ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

from poc_core.records import ProofSpec
from poc_core.schemes.artifact.encoding import decode_vector
from poc_core.schemes.artifact.options import ArtifactOptions
from workers.engines.base import Engine
from workers.pipeline import compute_all

# For a nonce with an artifact on one side only: the largest distance of two unit vectors.
_FURTHEST = 2.0


@dataclass(frozen=True)
class Distance:
    """The mean and the largest L2 distance between two artifacts of the same nonce."""

    mean: float
    largest: float

    def is_within(self, other: Distance) -> bool:
        """Returns True if neither the mean nor the largest distance exceeds that of `other`."""
        return self.mean <= other.mean and self.largest <= other.largest


def artifacts(engine: Engine, spec: ProofSpec, nonces: int, batch: int) -> list[JsonValue]:
    """Computes the artifacts of the nonces 0 to `nonces` - 1, in micro-batches of `batch` nonces.

    A nonce whose artifact cannot be computed has None.
    """
    return [
        value
        for first in range(0, nonces, batch)
        for value in compute_all(engine, spec, range(first, min(first + batch, nonces)))
    ]


def distance(spec: ProofSpec, ours: Sequence[JsonValue], theirs: Sequence[JsonValue]) -> Distance:
    """Returns the distance between two lists of artifacts of the same nonces, which must not be
    empty.
    """
    k_dim = ArtifactOptions.of(spec).k_dim
    apart = [_apart(*pair, k_dim) for pair in zip(ours, theirs, strict=True)]
    return Distance(float(np.mean(apart)), max(apart))


def _apart(one: JsonValue, other: JsonValue, k_dim: int) -> float:
    if one is None or other is None:
        return 0.0 if one is other else _FURTHEST
    return float(np.linalg.norm(decode_vector(str(one), k_dim) - decode_vector(str(other), k_dim)))
