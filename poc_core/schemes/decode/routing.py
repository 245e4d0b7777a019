"""Experts in decode proofs, chosen by the seed instead of the gate (protocol.md, 8.2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from poc_core.arithmetic import rng

# Logit of the first chosen expert beyond its place: above any gate's, also after a softmax.
# Not settled by the network.
LADDER = 100
_NOT_CHOSEN = -10000.0


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
