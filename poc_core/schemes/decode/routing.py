"""Mixtures of experts in decode proofs: the seed chooses the experts, not the gate
(protocol.md, section 8.2).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from poc_core.arithmetic import rng

# Logit of the first chosen expert beyond its place: above whatever a gate says, also after a
# softmax. Not settled by the network.
LADDER = 100
_NOT_CHOSEN = -10000.0


def route_seeds(
    block_hash: str, nonces: Sequence[int], moe_layer: int, device: torch.device
) -> Tensor:
    """Of the m-th MoE layer of the whole model: int64 (n,)."""
    seeds = [
        rng.seed_from_string(f"{block_hash}_n{nonce}_route_layer_{moe_layer}") for nonce in nonces
    ]
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def route_hashes(seeds: Tensor, step: int | Tensor) -> Tensor:
    """What the first expert at step t (0: the whole prefill) follows from: int64 in the common
    shape.
    """
    steps = step if isinstance(step, Tensor) else torch.full_like(seeds, step)
    return rng.murmur3_plain(steps, seeds)


def first_experts(seeds: Tensor, step: int | Tensor, n_experts: int) -> Tensor:
    """The first of the experts that follow one another at step t: int64 in the common shape."""
    return route_hashes(seeds, step) % n_experts


def forced_logits(first: Tensor, n_experts: int, top_k: int, dtype: torch.dtype) -> Tensor:
    """What takes the place of a gate's logits: (n, n_experts). The expert `first` + j has the
    j-th largest.
    """
    places = (torch.arange(n_experts, device=first.device) - first[:, None]) % n_experts
    ladder = LADDER + top_k - places
    return torch.where(places < top_k, ladder.to(torch.float32), _NOT_CHOSEN).to(dtype)
