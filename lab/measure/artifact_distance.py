"""How far artifacts of the same nonces lie from each other, computed in two ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

from poc_core.arithmetic.encoding import decode_vector
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.options import ArtifactOptions
from workers.engines.base import Engine
from workers.pipeline import compute_all

# Of a nonce that has an artifact on one side only: no two vectors of length 1 are further apart.
_FURTHEST = 2.0


@dataclass(frozen=True)
class Distance:
    """L2 of the artifacts of some nonces, each from its like."""

    mean: float
    largest: float

    def is_within(self, other: Distance) -> bool:
        """True if neither number is above the other's."""
        return self.mean <= other.mean and self.largest <= other.largest


def artifacts(engine: Engine, spec: ProofSpec, nonces: int, batch: int) -> list[JsonValue]:
    """Artifacts of the first so many nonces, in micro-batches of `batch`; None: not computable."""
    return [
        value
        for first in range(0, nonces, batch)
        for value in compute_all(engine, spec, range(first, min(first + batch, nonces)))
    ]


def distance(spec: ProofSpec, ours: Sequence[JsonValue], theirs: Sequence[JsonValue]) -> Distance:
    """How far artifacts lie from others of the same nonces, of which there is one at least."""
    k_dim = ArtifactOptions.of(spec).k_dim
    apart = [_apart(*pair, k_dim) for pair in zip(ours, theirs, strict=True)]
    return Distance(float(np.mean(apart)), max(apart))


def _apart(one: JsonValue, other: JsonValue, k_dim: int) -> float:
    if one is None or other is None:
        return 0.0 if one is other else _FURTHEST
    return float(np.linalg.norm(decode_vector(str(one), k_dim) - decode_vector(str(other), k_dim)))
