"""A scratch KV cache that stands in for chat's while a proof batch runs.

A proof is prefill only: once a layer has run, nobody reads its keys and values again. So one cache of one layer's
shape serves every layer, and the blocks that chat owns are never touched (docs/architecture.md, "Chat beside proofs").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from workers.vllm import compat

# Block 0 is vLLM's null block; sequences are laid out from block 1 on.
FIRST_BLOCK = 1


class NotIsolatableError(RuntimeError):
    """The model keeps state that a proof batch would overwrite, so proofs are refused rather than chat corrupted."""


@dataclass(frozen=True)
class ScratchGroup:
    """Attention layers that share one metadata builder and one cache shape."""

    group: Any
    block_size: int  # tokens per block as the attention kernel addresses them
    layer_names: tuple[str, ...]
    block_dim: int


class ScratchCaches:
    """One scratch cache per distinct cache shape of the model, grown to the largest batch seen."""

    def __init__(self, runner: Any, layers: dict[str, Any]) -> None:
        """`layers`: the attention modules by name (vLLM's static forward context).

        Raises NotIsolatableError for models with state-space or other non-attention caches.
        """
        self._layers = layers
        self._caches: dict[tuple[Any, ...], torch.Tensor] = {}
        self.groups: list[ScratchGroup] = []
        for group in compat.attention_groups(runner):
            names = tuple(group.layer_names)
            if not compat.is_plain_attention(group):
                raise NotIsolatableError(
                    f"layers {names[0]} .. keep a {type(group.kv_cache_spec).__name__} state, which cannot be isolated "
                    "from chat; compute proofs with a model that uses attention only"
                )
            block_dim = compat.cache_block_dim(group, self._live(names[0]))
            self.groups.append(ScratchGroup(group, compat.kernel_block_size(group), names, block_dim))
        isolated = {name for group in self.groups for name in group.layer_names}
        for name, layer in layers.items():
            cache = getattr(layer, "kv_cache", None)
            if name not in isolated and isinstance(cache, torch.Tensor) and cache.numel():
                raise NotIsolatableError(
                    f"layer {name} keeps a cache outside all attention groups, which cannot be isolated from chat; "
                    "compute proofs with another model"
                )

    @property
    def block_size(self) -> int:
        """The largest block of any group: a sequence takes whole blocks, so tokens are counted in multiples of it."""
        return max((group.block_size for group in self.groups), default=1)

    @contextmanager
    def bound(self, n_sequences: int, seq_len: int) -> Iterator[None]:
        """Bind the scratch caches to every attention layer, and chat's own again at the end, whatever happens."""
        live: dict[str, torch.Tensor] = {}
        try:
            for group in self.groups:
                n_blocks = FIRST_BLOCK + n_sequences * blocks_per_sequence(seq_len, group.block_size)
                for name in group.layer_names:
                    cache = self._live(name)
                    scratch = self._scratch(cache, group.block_dim, n_blocks)
                    live[name] = cache
                    self._layers[name].kv_cache = scratch
            yield
        finally:
            for name, cache in live.items():
                self._layers[name].kv_cache = cache

    def _live(self, layer_name: str) -> torch.Tensor:
        cache = self._layers[layer_name].kv_cache
        if not isinstance(cache, torch.Tensor):
            raise NotIsolatableError(
                f"layer {layer_name} binds a {type(cache).__name__} as its cache, which cannot be isolated from chat"
            )
        return cache

    def _scratch(self, live: torch.Tensor, block_dim: int, n_blocks: int) -> torch.Tensor:
        """A cache like `live` but with at least `n_blocks` blocks: same dtype, other dimensions and memory order."""
        order = sorted(range(live.dim()), key=live.stride, reverse=True)
        key = (
            live.dtype,
            block_dim,
            tuple(order),
            *(size for dim, size in enumerate(live.shape) if dim != block_dim),
        )
        scratch = self._caches.get(key)
        if scratch is None or scratch.shape[block_dim] < n_blocks:
            self._caches.pop(key, None)
            sizes = list(live.shape)
            sizes[block_dim] = n_blocks
            # Zeros, not empty: slots past a sequence's end are masked, but a masked NaN still poisons a product.
            scratch = torch.zeros([sizes[dim] for dim in order], dtype=live.dtype, device=live.device)
            scratch = scratch.permute([order.index(dim) for dim in range(live.dim())])
            self._caches[key] = scratch
        return scratch


def blocks_per_sequence(seq_len: int, block_size: int) -> int:
    return -(-seq_len // block_size)
