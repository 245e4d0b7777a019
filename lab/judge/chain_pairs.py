"""Counts how often two machines' decode proofs of the same nonce differ. A decode proof is a chain
of codebook points.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from lab.judge.comparisons import check_count, check_same
from lab.judge.proof_files import CHAIN_TERMS, Machine

PAIR_COLUMNS: Sequence[str] = ("machines", "nonces", "chains that part", "on average from step")


@dataclass(frozen=True)
class ChainPair:
    """How often the chains of two machines differ, counted over the nonces that both computed."""

    name: str
    n: int
    n_parted: int
    mean_step: float | None  # mean step at which chains diverge; None if none diverges

    @property
    def cells(self) -> list[str]:
        share = f"{self.n_parted:,} ({self.n_parted / self.n:.1%})"
        step = "-" if self.mean_step is None else f"{self.mean_step:.0f}"
        return [self.name, f"{self.n:,}", share, step]

    @property
    def document(self) -> dict[str, Any]:
        return asdict(self) | {"share_parted": self.n_parted / self.n}


def compare_chains(machines: Iterable[Machine]) -> list[ChainPair]:
    """Compares the chains of every pair of machines.

    Raises UsageError if two machines' inputs differ, or if they have too few nonces in common.
    """
    return [_pair(one, other) for one, other in combinations(machines, 2)]


def _pair(one: Machine, other: Machine) -> ChainPair:
    assert one.chains is not None
    assert other.chains is not None
    check_same(one, one.chains, other, other.chains, CHAIN_TERMS)
    common = sorted(one.chains.points.keys() & other.chains.points.keys())
    check_count(len(common), f"{one.path} and {other.path} have in common")
    steps = [_parts_at(one.chains.points[nonce], other.chains.points[nonce]) for nonce in common]
    parted = [step for step in steps if step is not None]
    mean = float(np.mean(parted)) if parted else None
    return ChainPair(f"{one.name}, {other.name}", len(common), len(parted), mean)


def _parts_at(one: Sequence[int], other: Sequence[int]) -> int | None:
    if list(one) == list(other):
        return None
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((step for step, (a, b) in enumerate(pairs) if a != b), shorter)
