"""Decode proofs step by step: seeds from the point before, states' nearest points, experts.

protocol.md, section 8. All stays on the device: no step asks the host for the last one's points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from poc_core.arithmetic import rng
from poc_core.schemes.decode.codebook import codebook
from poc_core.schemes.decode.codebook_file import DIM, POINTS

_A = 0x9E3779B1
_B = 0x85EBCA77
_MASK = 0xFFFFFFFF
_SALTS = {"embed": 0x0D, "pick": 0x91, "token": 0x57}
_EPSILON = 1e-8

# The margin of a claim that is no point of the codebook (section 8.3).
NO_POINT_MARGIN = 2.0
# The point of a state that is not finite.
NO_POINT = -1

# Logit of the first chosen expert beyond its place: above any gate's, also after a softmax.
# Not settled by the network.
LADDER = 100
_NOT_CHOSEN = -10000.0

Purpose = Literal["embed", "pick", "token"]


def base_seeds(
    block_hash: str, public_key: str, nonces: Sequence[int], device: torch.device
) -> Tensor:
    """Base of a nonce's step seeds: int64 (n,), 0 .. 2^32-1."""
    seeds = [rng.seed_from_string(f"{block_hash}_{public_key}_nonce{nonce}") for nonce in nonces]
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def step_seeds(base: Tensor, step: int | Tensor, points: Tensor, purpose: Purpose) -> Tensor:
    """The seeds of step t = 1, 2, ...: int64 in the common shape of `base`, `step` and `points`.

    `points`: those of step t - 1, int64.
    """
    return rng.murmur3_plain((points * _A + step * _B + _SALTS[purpose]) & _MASK, base)


def step_inputs(
    base: Tensor, step: int | Tensor, points: Tensor, hidden: int, dtype: torch.dtype
) -> Tensor:
    """The input embeddings of step t: (..., hidden) in `dtype`; arguments broadcast to (...)."""
    seeds = step_seeds(base, step, points, "embed")
    return rng.normal(seeds.reshape(-1), hidden, base.device, dtype).view(*seeds.shape, hidden)


def step_token_ids(base: Tensor, step: int | Tensor, points: Tensor, vocab_size: int) -> Tensor:
    """The token ids of step t, for models that route by them: int32; arguments broadcast."""
    seeds = step_seeds(base, step, points, "token")
    return (rng.murmur3_plain(torch.zeros_like(seeds), seeds) % vocab_size).to(torch.int32)


def first_picks(
    block_hash: str, public_key: str, nonces: Sequence[int], hidden: int, device: torch.device
) -> Tensor:
    """Dimensions at which the prefill's last state is read: int64 (n, DIM), in protocol order."""
    names = [f"{block_hash}_{public_key}_nonce_{nonce}_pick_{DIM}_decode0" for nonce in nonces]
    return rng.smallest_hashes([rng.seed_from_string(name) for name in names], hidden, DIM, device)


def step_picks(base: Tensor, step: int | Tensor, points: Tensor, hidden: int) -> Tensor:
    """Dimensions at which the state of step t is read: int64 (..., DIM)."""
    seeds = step_seeds(base, step, points, "pick")
    return rng.smallest_hashes(seeds.reshape(-1), hidden, DIM, base.device).view(*seeds.shape, DIM)


@dataclass(frozen=True)
class Snap:
    """Nearest codebook points of states."""

    scores: Tensor  # float32 (n, POINTS), NaN where the state is not finite
    # int64 (n,): of the largest score, the lowest on a tie; NO_POINT where there is none
    points: Tensor


def snap(states: Tensor, picks: Tensor) -> Snap:
    """The points of states (n, hidden), any dtype, after the final norm."""
    x = states.to(torch.float32)
    x = x / (x.norm(dim=-1, keepdim=True) + _EPSILON)
    q = x.gather(1, picks)
    q = q / (q.norm(dim=-1, keepdim=True) + _EPSILON)
    finite = torch.isfinite(q).all(-1)
    scores = torch.where(finite[:, None], q @ codebook(states.device).T, torch.nan)
    # torch.argmax promises nothing about ties: take the first point that reaches the maximum.
    largest = scores.amax(-1, keepdim=True)
    order = torch.arange(POINTS, device=states.device).expand_as(scores)
    points = torch.where(scores == largest, order, POINTS).amin(-1)
    return Snap(scores, torch.where(finite, points, NO_POINT))


def claimed_margins(scores: Tensor, claims: Tensor) -> Tensor:
    """How far claims (n,) lie below the best point of scores (n, POINTS): float32 (n,).

    0 where a claim is the best, NO_POINT_MARGIN where it is no point (section 8.3).
    """
    known = (claims >= 0) & (claims < POINTS)
    claimed = scores.gather(1, claims.clamp(0, POINTS - 1)[:, None])[:, 0]
    return torch.where(known, scores.amax(-1) - claimed, NO_POINT_MARGIN)


# Experts are chosen by the seed instead of the gate (section 8.2).


def route_seeds(
    block_hash: str, nonces: Sequence[int], moe_layer: int, device: torch.device
) -> Tensor:
    """Seeds of the m-th MoE layer of the whole model: int64 (n,)."""
    seeds = [
        rng.seed_from_string(f"{block_hash}_n{nonce}_route_layer_{moe_layer}") for nonce in nonces
    ]
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def route_hashes(seeds: Tensor, step: int | Tensor) -> Tensor:
    """Hashes that choose the first expert at step t (0: the whole prefill): int64, broadcast."""
    steps = step if isinstance(step, Tensor) else torch.full_like(seeds, step)
    return rng.murmur3_plain(steps, seeds)


def first_experts(seeds: Tensor, step: int | Tensor, n_experts: int) -> Tensor:
    """The first of the consecutive experts at step t: int64 in the common shape."""
    return route_hashes(seeds, step) % n_experts


def forced_logits(first: Tensor, n_experts: int, top_k: int, dtype: torch.dtype) -> Tensor:
    """Logits in place of a gate's: (n, n_experts); expert `first` + j has the j-th largest."""
    places = (torch.arange(n_experts, device=first.device) - first[:, None]) % n_experts
    ladder = LADDER + top_k - places
    return torch.where(places < top_k, ladder.to(torch.float32), _NOT_CHOSEN).to(dtype)
