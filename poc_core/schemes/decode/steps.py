"""The arithmetic of decode steps: seeds, nearest codebook points, experts (protocol.md, section 8).
All tensors stay on the device, so that steps need not wait for the host.
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

# Added to the logits of chosen experts, so that they exceed all other logits also after a softmax.
# The network does not define the value.
LADDER = 100
_NOT_CHOSEN = -10000.0

Purpose = Literal["embed", "pick", "token"]


def base_seeds(
    block_hash: str, public_key: str, nonces: Sequence[int], device: torch.device
) -> Tensor:
    """Returns the 32-bit number of each nonce from which `step_seeds` derives seeds: int64 (n,)."""
    seeds = [rng.seed_from_string(f"{block_hash}_{public_key}_nonce{nonce}") for nonce in nonces]
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def step_seeds(base: Tensor, step: int | Tensor, points: Tensor, purpose: Purpose) -> Tensor:
    """Returns seeds of decode steps: int64, in the shape to which `base`, `step` and `points`
    broadcast. `base`: from `base_seeds`. `step`: from 1 on. `points`: the point before each step,
    int64. `purpose`: whether the seeds are for input embeddings, choice of dimensions or token ids.
    """
    return rng.murmur3_plain((points * _A + step * _B + _SALTS[purpose]) & _MASK, base)


def step_inputs(
    base: Tensor, step: int | Tensor, points: Tensor, hidden: int, dtype: torch.dtype
) -> Tensor:
    """Returns decode steps' input embeddings: (..., hidden), shaped as in `step_seeds`."""
    seeds = step_seeds(base, step, points, "embed")
    return rng.normal(seeds.reshape(-1), hidden, base.device, dtype).view(*seeds.shape, hidden)


def step_token_ids(base: Tensor, step: int | Tensor, points: Tensor, vocab_size: int) -> Tensor:
    """Returns decode steps' token ids for MoE routers: int32, shaped as in `step_seeds`."""
    seeds = step_seeds(base, step, points, "token")
    return (rng.murmur3_plain(torch.zeros_like(seeds), seeds) % vocab_size).to(torch.int32)


def first_picks(
    block_hash: str, public_key: str, nonces: Sequence[int], hidden: int, device: torch.device
) -> Tensor:
    """Returns the dimensions to read from each prefill's state (section 2.4): int64 (n, DIM)."""
    names = [f"{block_hash}_{public_key}_nonce_{nonce}_pick_{DIM}_decode0" for nonce in nonces]
    return rng.smallest_hashes([rng.seed_from_string(name) for name in names], hidden, DIM, device)


def step_picks(base: Tensor, step: int | Tensor, points: Tensor, hidden: int) -> Tensor:
    """Returns the dimensions to read of steps' states: int64 (..., DIM), like `step_seeds`."""
    seeds = step_seeds(base, step, points, "pick")
    return rng.smallest_hashes(seeds.reshape(-1), hidden, DIM, base.device).view(*seeds.shape, DIM)


@dataclass(frozen=True)
class Snap:
    """The codebook points that are nearest to n hidden states, and the scores of all points."""

    scores: Tensor  # float32 (n, POINTS), NaN if the state is not finite
    # int64 (n,): the first point with the largest score; NO_POINT if the state is not finite
    points: Tensor


def snap(states: Tensor, picks: Tensor) -> Snap:
    """Finds each hidden state's nearest codebook point. `states`: (n, hidden), of any dtype, after
    the final norm. `picks`: the dimensions to read, int64 (n, DIM).
    """
    x = states.to(torch.float32)
    x = x / (x.norm(dim=-1, keepdim=True) + _EPSILON)
    q = x.gather(1, picks)
    q = q / (q.norm(dim=-1, keepdim=True) + _EPSILON)
    finite = torch.isfinite(q).all(-1)
    scores = torch.where(finite[:, None], q @ codebook(states.device).T, torch.nan)
    # Takes the first point with the maximum, because torch.argmax may return any of them.
    largest = scores.amax(-1, keepdim=True)
    order = torch.arange(POINTS, device=states.device).expand_as(scores)
    points = torch.where(scores == largest, order, POINTS).amin(-1)
    return Snap(scores, torch.where(finite, points, NO_POINT))


def claimed_margins(scores: Tensor, claims: Tensor) -> Tensor:
    """Returns each claimed point's margin: the best score of the state minus the score of the
    claimed point, float32 (n,). `scores`: (n, POINTS), from `snap`. `claims`: int64 (n,). The
    margin of an invalid claim is NO_POINT_MARGIN (section 8.3).
    """
    known = (claims >= 0) & (claims < POINTS)
    claimed = scores.gather(1, claims.clamp(0, POINTS - 1)[:, None])[:, 0]
    return torch.where(known, scores.amax(-1) - claimed, NO_POINT_MARGIN)


# The seed chooses the experts instead of the gate (section 8.2).


def route_seeds(
    block_hash: str, nonces: Sequence[int], moe_layer: int, device: torch.device
) -> Tensor:
    """Returns the seed that chooses each nonce's experts in an MoE layer: int64 (n,). `moe_layer`:
    the index among the model's MoE layers with seeded experts.
    """
    seeds = [
        rng.seed_from_string(f"{block_hash}_n{nonce}_route_layer_{moe_layer}") for nonce in nonces
    ]
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def route_hashes(seeds: Tensor, step: int | Tensor) -> Tensor:
    """Returns the hashes that choose each nonce's first expert in a step: int64, in the shape to
    which `seeds` (from `route_seeds`) and `step` broadcast. `step`: 0 for the prefill.
    """
    steps = step if isinstance(step, Tensor) else torch.full_like(seeds, step)
    return rng.murmur3_plain(steps, seeds)


def first_experts(seeds: Tensor, step: int | Tensor, n_experts: int) -> Tensor:
    """Returns each nonce's first expert in a step: int64. Further experts have the next indices."""
    return route_hashes(seeds, step) % n_experts


def forced_logits(first: Tensor, n_experts: int, top_k: int, dtype: torch.dtype) -> Tensor:
    """Returns logits (n, n_experts) that replace the logits of an MoE router. The experts first,
    first + 1, ... (top_k of them, modulo n_experts) have the largest logits, in descending order;
    all other experts have the same very small logit. `first`: int64 (n,).
    """
    places = (torch.arange(n_experts, device=first.device) - first[:, None]) % n_experts
    ladder = LADDER + top_k - places
    return torch.where(places < top_k, ladder.to(torch.float32), _NOT_CHOSEN).to(dtype)
