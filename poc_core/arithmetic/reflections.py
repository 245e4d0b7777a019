"""Householder reflections by vectors that are seeded with the block hash (protocol.md, sections 2
and 3).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from poc_core.arithmetic import fused, rng


def householder_vectors(names: Sequence[str], dim: int, device: torch.device) -> Tensor:
    """Returns one random unit vector per name, seeded with that name: float32 (len(names), dim)."""
    v = rng.normal([rng.seed_from_string(name) for name in names], dim, device)
    return v.div_(v.norm(dim=-1, keepdim=True))


def layer_vectors(
    block_hash: str, n_layers: int, hidden: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns one unit vector per decoder layer, by which the layer's output is reflected:
    (n_layers, hidden) in `dtype` (protocol.md, section 2.2).
    """
    names = [f"{block_hash}_layer_{layer}_householder" for layer in range(n_layers)]
    return householder_vectors(names, hidden, device).to(dtype)


def reflect_terms(terms: list[Tensor], v: Tensor) -> list[Tensor]:
    """Returns the tensors of `terms` (..., hidden), each reflected by v (hidden,).

    Overwrites a tensor if a fused kernel supports its shape, dtype and device. Otherwise returns a
    new tensor.
    """
    if not fused.is_on(v.device):
        return [reflect(x, v) for x in terms]
    from poc_core.arithmetic.reflect import (  # here: only torch's CUDA builds include Triton
        can_reflect,
        reflect_,
    )

    # A residual of hyper-connections has one row per stream, so more rows than the hidden states.
    groups = [terms] if can_reflect(terms, v) else [[x] for x in terms]
    done: list[Tensor] = []
    for group in groups:
        if can_reflect(group, v):
            reflect_(group, v)
            done += group
        else:
            done += [reflect(x, v) for x in group]
    return done


def reflect(x: Tensor, v: Tensor) -> Tensor:
    """Returns x - 2 (x . v) v as a new tensor.

    The product x . v is the sum along the last dimension. `v` broadcasts against `x`.
    """
    return x - 2 * (x * v).sum(-1, keepdim=True) * v
