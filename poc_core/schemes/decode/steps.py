"""The steps of decode proofs: seeds, nearest codebook points, experts (protocol.md, section 8).

All tensors are on the device, so a step does not wait until the host has read the previous points.
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

# The margin of a claim that is not a point of the codebook (section 8.3).
NO_POINT_MARGIN = 2.0
# The point of a state that is not finite.
NO_POINT = -1

# Added to the chosen experts' logits, so that they exceed the other experts' also after a softmax.
# The network does not define the value.
LADDER = 100
_NOT_CHOSEN = -10000.0

Purpose = Literal["embed", "pick", "token"]


def base_seeds(
    block_hash: str, public_key: str, nonces: Sequence[int], device: torch.device
) -> Tensor:
    """Returns a 32-bit number of each nonce, for its `step_seeds`: int64 (n,)."""
    seeds = [rng.seed_from_string(f"{block_hash}_{public_key}_nonce{nonce}") for nonce in nonces]
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def step_seeds(base: Tensor, step: int | Tensor, points: Tensor, purpose: Purpose) -> Tensor:
    """Returns the seeds of step 1, 2, ...: int64 in the broadcast shape of the arguments.

    `points`: the points before this step, int64.
    """
    return rng.murmur3_plain((points * _A + step * _B + _SALTS[purpose]) & _MASK, base)


def step_inputs(
    base: Tensor, step: int | Tensor, points: Tensor, hidden: int, dtype: torch.dtype
) -> Tensor:
    """Returns a step's input embeddings: (..., hidden) in `dtype`. Arguments broadcast to (...)."""
    seeds = step_seeds(base, step, points, "embed")
    return rng.normal(seeds.reshape(-1), hidden, base.device, dtype).view(*seeds.shape, hidden)


def step_token_ids(base: Tensor, step: int | Tensor, points: Tensor, vocab_size: int) -> Tensor:
    """Returns a step's token ids, for models that route by token: int32. Arguments broadcast."""
    seeds = step_seeds(base, step, points, "token")
    return (rng.murmur3_plain(torch.zeros_like(seeds), seeds) % vocab_size).to(torch.int32)


def first_picks(
    block_hash: str, public_key: str, nonces: Sequence[int], hidden: int, device: torch.device
) -> Tensor:
    """Returns the dimensions to read of each prefill's last state: int64 (n, DIM), in order."""
    names = [f"{block_hash}_{public_key}_nonce_{nonce}_pick_{DIM}_decode0" for nonce in nonces]
    return rng.smallest_hashes([rng.seed_from_string(name) for name in names], hidden, DIM, device)


def step_picks(base: Tensor, step: int | Tensor, points: Tensor, hidden: int) -> Tensor:
    """Returns the dimensions to read of a step's states: int64 (..., DIM)."""
    seeds = step_seeds(base, step, points, "pick")
    return rng.smallest_hashes(seeds.reshape(-1), hidden, DIM, base.device).view(*seeds.shape, DIM)


@dataclass(frozen=True)
class Snap:
    """The nearest codebook points of states."""

    scores: Tensor  # float32 (n, POINTS), NaN if the state is not finite
    # int64 (n,): the first point with the largest score; NO_POINT if the state is not finite
    points: Tensor


def snap(states: Tensor, picks: Tensor) -> Snap:
    """Returns the nearest points of states (n, hidden), of any dtype, after the final norm.

    `picks`: the dimensions to read, int64 (n, DIM).
    """
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
    """Returns the margins of claimed points (n,): the best score minus the claim's score.

    `scores`: (n, POINTS). The margin of a claim that is no point is NO_POINT_MARGIN (section 8.3).
    """
    known = (claims >= 0) & (claims < POINTS)
    claimed = scores.gather(1, claims.clamp(0, POINTS - 1)[:, None])[:, 0]
    return torch.where(known, scores.amax(-1) - claimed, NO_POINT_MARGIN)


# The seed chooses the experts instead of the gate (section 8.2).


def route_seeds(
    block_hash: str, nonces: Sequence[int], moe_layer: int, device: torch.device
) -> Tensor:
    """Returns the nonces' seeds of an MoE layer: int64 (n,). `moe_layer`: its index among them."""
    seeds = [
        rng.seed_from_string(f"{block_hash}_n{nonce}_route_layer_{moe_layer}") for nonce in nonces
    ]
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def route_hashes(seeds: Tensor, step: int | Tensor) -> Tensor:
    """Returns the hashes that choose the first expert in a step: int64. Arguments broadcast.

    `step`: 0 for the complete prefill.
    """
    steps = step if isinstance(step, Tensor) else torch.full_like(seeds, step)
    return rng.murmur3_plain(steps, seeds)


def first_experts(seeds: Tensor, step: int | Tensor, n_experts: int) -> Tensor:
    """Returns the first of a step's consecutive experts: int64. Arguments broadcast."""
    return route_hashes(seeds, step) % n_experts


def forced_logits(first: Tensor, n_experts: int, top_k: int, dtype: torch.dtype) -> Tensor:
    """Returns logits that replace a gate's: (n, n_experts).

    The top_k experts from `first` on (modulo n_experts) get the largest logits, in this order.
    """
    places = (torch.arange(n_experts, device=first.device) - first[:, None]) % n_experts
    ladder = LADDER + top_k - places
    return torch.where(places < top_k, ladder.to(torch.float32), _NOT_CHOSEN).to(dtype)
