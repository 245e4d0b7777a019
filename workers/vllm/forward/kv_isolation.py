"""Scratch caches, which replace chat's KV caches during a proof's slice, so that chat's caches stay
unchanged (docs/architecture.md, "Chat and proofs"). In a proof without decode steps, a layer's keys
and values are not read after the layer has run, except by layers that read another layer's cache.
So layers of one kind can share one scratch cache.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.vllm.release import kv_caches

# Block 0 is vLLM's null block; sequences start at block 1.
FIRST_BLOCK = 1

Zeros = Callable[[int, torch.dtype], Tensor]
"""A function that allocates zeros: (number of elements, dtype) -> flat tensor."""


class NotIsolatableError(RuntimeError):
    """Proofs would overwrite state that the model keeps for chat, so only chat is served."""


@dataclass(frozen=True)
class ScratchGroup:
    """A group of layers with one attention metadata builder and one kind of cache."""

    group: Any
    block_size: int  # tokens per block of the attention kernel
    layer_names: tuple[str, ...]
    block_dim: int
    is_state: bool  # True: a cache has one block per sequence of any length

    def blocks_per_sequence(self, seq_len: int) -> int:
        return 1 if self.is_state else -(-seq_len // self.block_size)

    def n_blocks(self, n_sequences: int, seq_len: int) -> int:
        return FIRST_BLOCK + n_sequences * self.blocks_per_sequence(seq_len)


class ScratchCaches:
    """Scratch caches for all layers of the model. Each has grown to the size that the largest batch
    so far needed. Two layers share a scratch cache if their caches have the same kind and shape and
    are never needed at the same time. Caches of the same decoder layer are not shared, nor is a
    cache that a later layer reads. If `private` is True, no cache is shared.
    """

    def __init__(self, runner: Any, layers: dict[str, Any]) -> None:
        """`layers`: attention modules by name. Raises NotIsolatableError if a cache is of unknown
        kind.
        """
        self.private = False
        self._layers = layers
        self._caches: dict[tuple[Any, ...], list[Tensor]] = {}
        self._size = (0, 0)  # sequences, and tokens of each, for which `bound` was called last
        self.groups: list[ScratchGroup] = []
        for group in kv_caches.attention_groups(runner):
            names = tuple(group.layer_names)
            kind = kv_caches.cache_kind(group)
            if kind is None:
                raise NotIsolatableError(
                    f"layers {names[0]} .. keep a {type(group.kv_cache_spec).__name__} cache, which"
                    " cannot be isolated from chat; compute proofs with another model"
                )
            live = self._live(names[0])
            if kind == "state":
                self.groups.append(ScratchGroup(group, 1, names, 0, True))
                continue
            if len(live) > 1:
                raise NotIsolatableError(
                    f"layer {names[0]} binds {len(live)} tensors as its cache, which cannot be"
                    " isolated from chat"
                )
            block_dim = kv_caches.cache_block_dim(group, live[0])
            self.groups.append(
                ScratchGroup(group, kv_caches.kernel_block_size(group), names, block_dim, False)
            )
        isolated = {name for group in self.groups for name in group.layer_names}
        for name in layers:
            if name not in isolated and any(cache.numel() for cache in self._tensors(name)):
                raise NotIsolatableError(
                    f"layer {name} keeps a cache outside all attention groups, which cannot be"
                    " isolated from chat; compute proofs with another model"
                )
        self._sources = {
            name: source for name in isolated if (source := kv_caches.cache_source(layers[name]))
        }
        self._places = {
            name: place
            for group in self.groups
            for name, place in _places(group.layer_names).items()
        }

    @contextmanager
    def bound(self, n_sequences: int, seq_len: int) -> Iterator[None]:
        """Inside the context, every attention layer uses a scratch cache. Restores chat's caches
        afterwards, also after an error.
        """
        scratch = {
            name: self._scratch(name, index, group.n_blocks(n_sequences, seq_len))
            for index, group in enumerate(self.groups)
            for name in group.layer_names
        }
        if self._size != (n_sequences, seq_len):
            self._size = (n_sequences, seq_len)
            self.clear(scratch, n_sequences, seq_len)
        with self.bound_to(scratch):
            yield

    @contextmanager
    def bound_to(self, caches: Mapping[str, Sequence[Tensor]]) -> Iterator[None]:
        """Inside the context, the layers use the given caches, by layer (see `new_caches`).
        Restores chat's caches afterwards, also after an error.
        """
        live: dict[str, Any] = {}
        try:
            for name, cache in caches.items():
                live[name] = own = self._layers[name].kv_cache
                self._layers[name].kv_cache = (
                    cache[0] if isinstance(own, Tensor) else type(own)(cache)
                )
            yield
        finally:
            for name, cache in live.items():
                self._layers[name].kv_cache = cache

    def new_caches(
        self, n_sequences: int, n_tokens: int, zeros: Zeros | None = None
    ) -> dict[str, list[Tensor]]:
        """Returns new caches by layer. They have room for `n_tokens` tokens, in complete blocks for
        all sequences together, and for the states of `n_sequences` sequences. A layer that reads
        another layer's cache gets that layer's new cache. `zeros`: allocates the memory; None means
        torch.zeros.
        """
        found: dict[str, list[Tensor]] = {}
        for group in self.groups:
            n_blocks = FIRST_BLOCK + (
                n_sequences if group.is_state else n_tokens // group.block_size
            )
            for name in group.layer_names:
                source = self._sources.get(name, name)
                if source not in found:
                    found[source] = [
                        self._zeros_like(cache, name, group, n_blocks, zeros)
                        for cache in self._live(source)
                    ]
                found[name] = found[source]
        return found

    def scratch_bytes_per_token(self) -> int:
        """Returns how many bytes `new_caches` needs for each token, in all layers together; rounded
        up.
        """
        return sum(
            -(-self._page(live, name, group) * live.element_size() // group.block_size)
            for live, name, group in self._chat_tensors()
            if not group.is_state
        )

    def scratch_bytes_per_state(self) -> int:
        """Returns how many bytes `new_caches` needs for one sequence's states in all layers."""
        return sum(
            self._page(live, name, group) * live.element_size()
            for live, name, group in self._chat_tensors()
            if group.is_state
        )

    def n_new_caches(self) -> int:
        """Returns the number of tensors that `new_caches` creates."""
        return sum(1 for _ in self._chat_tensors())

    def clear(self, caches: Mapping[str, Sequence[Tensor]], n_sequences: int, seq_len: int) -> None:
        """Fills caches with zeros, by layer, for `n_sequences` new sequences of `seq_len` tokens.
        NaN of an earlier nonce would spoil sums even at masked positions (see `_zeros_like`), so
        all later nonces in its place would be excluded.
        """
        done: set[int] = set()
        for group in self.groups:
            n_blocks = group.n_blocks(n_sequences, seq_len)
            for cache in (one for name in group.layer_names for one in caches[name]):
                if id(cache) not in done:  # layers share caches
                    done.add(id(cache))
                    cache.narrow(group.block_dim, 0, n_blocks).zero_()

    def chats_bytes(self) -> int:
        """Returns the size of chat's caches in bytes, without counting shared memory twice."""
        memory = {
            cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes()
            for cache, _name, _group in self._chat_tensors()
        }
        return sum(memory.values())

    def forget(self) -> None:
        self._caches.clear()

    def chats_first_blocks(self, n_sequences: int, seq_len: int) -> dict[str, list[Tensor]]:
        """Returns copies, by layer, of the blocks in chat's caches that a batch without scratch
        caches would overwrite.
        """
        return {
            name: [
                cache.narrow(
                    group.block_dim,
                    0,
                    min(group.n_blocks(n_sequences, seq_len), cache.shape[group.block_dim]),
                )
                .clone(memory_format=torch.contiguous_format)
                .view(torch.uint8)
                for cache in self._live(name)
            ]
            for group in self.groups
            for name in group.layer_names
        }

    def _tensors(self, layer_name: str) -> Sequence[Any]:
        """Returns the tensors that a layer uses as its cache. Empty if the layer has no cache."""
        cache = getattr(self._layers[layer_name], "kv_cache", None)
        if cache is None:
            return []
        if isinstance(cache, Tensor):
            return [cache]
        if isinstance(cache, list | tuple) and all(isinstance(one, Tensor) for one in cache):
            return cache
        raise NotIsolatableError(
            f"layer {layer_name} binds a {type(cache).__name__} as its cache, which cannot be"
            " isolated from chat"
        )

    def _live(self, layer_name: str) -> Sequence[Tensor]:
        if not (tensors := self._tensors(layer_name)):
            raise NotIsolatableError(
                f"layer {layer_name} has no cache, so it cannot be isolated from chat"
            )
        return tensors

    def _scratch(self, name: str, index: int, n_blocks: int) -> list[Tensor]:
        """Returns scratch caches in the shapes of a layer's chat caches, with at least `n_blocks`
        blocks. State caches contain zeros. `index`: the number of the layer's group.
        """
        group, live = self.groups[index], self._live(name)
        source = self._sources.get(name, name)
        alone = self.private or source in self._sources.values()
        kept = (source,) if alone else (index, self._places[name])
        key = (*kept, *(_shape_without(cache, group.block_dim) for cache in live))
        scratch = self._caches.get(key)
        if scratch is None or scratch[0].shape[group.block_dim] < n_blocks:
            self._caches.pop(key, None)
            scratch = self._caches[key] = [
                self._zeros_like(cache, name, group, n_blocks) for cache in live
            ]
        elif group.is_state:
            for cache in scratch:
                cache.zero_()
        return scratch

    def _chat_tensors(self) -> Iterator[tuple[Tensor, str, ScratchGroup]]:
        """Yields (tensor, layer name, group) for chat's caches. Skips layers that read another
        layer's cache.
        """
        for group in self.groups:
            for name in group.layer_names:
                if name not in self._sources:
                    for live in self._live(name):
                        yield live, name, group

    def _zeros_like(
        self,
        live: Tensor,
        name: str,
        group: ScratchGroup,
        n_blocks: int,
        zeros: Zeros | None = None,
    ) -> Tensor:
        """Returns a cache of zeros. Uninitialised memory could contain NaN, which spoils a sum even
        at masked positions after a sequence's end.
        """
        page = self._page(live, name, group)
        return zeros_like(live, group.block_dim, n_blocks, page, zeros)

    def _page(self, live: Tensor, name: str, group: ScratchGroup) -> int:
        """Returns the number of elements between the starts of two blocks in a scratch cache."""
        content = _block_extent(live, group.block_dim) * live.element_size()
        page = kv_caches.page_bytes(group.group, name, content) if not group.is_state else content
        return -(-page // live.element_size())


def zeros_like(
    live: Tensor, block_dim: int, n_blocks: int, page: int, zeros: Zeros | None = None
) -> Tensor:
    """Returns a cache of zeros with `n_blocks` blocks, and with the dtype, the other dimensions and
    the order of dimensions in memory of `live`.

    If blocks are the outermost dimension in memory, the starts of two neighbouring blocks are
    `page` elements apart, or fewer if they are closer together in `live`. The new cache thus keeps
    padding that kernels need, but has no gaps for other layers' blocks as `live` may have. `zeros`:
    see `new_caches`.
    """
    make = zeros or (lambda n, dtype: torch.zeros(n, dtype=dtype, device=live.device))
    sizes = list(live.shape)
    sizes[block_dim] = n_blocks
    # The stride of a dimension with one element is arbitrary.
    order = sorted(
        range(live.dim()), key=lambda dim: (live.stride(dim), dim == block_dim), reverse=True
    )
    wide = [dim for dim in order if live.shape[dim] > 1 or dim == block_dim]
    if wide[0] == block_dim and _block_extent(live, block_dim) <= page:
        strides = list(live.stride())
        strides[block_dim] = (
            min(live.stride(block_dim), page) if live.shape[block_dim] > 1 else page
        )
        return make(n_blocks * strides[block_dim], live.dtype).as_strided(sizes, strides)
    dense = make(math.prod(sizes), live.dtype).view([sizes[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(live.dim())])


def _block_extent(cache: Tensor, block_dim: int) -> int:
    """Returns the number of elements from a block's first to its last element in memory."""
    others = (dim for dim in range(cache.dim()) if dim != block_dim)
    return 1 + sum((cache.shape[dim] - 1) * cache.stride(dim) for dim in others)


def _shape_without(cache: Tensor, block_dim: int) -> tuple[Any, ...]:
    others = (dim for dim in range(cache.dim()) if dim != block_dim)
    return (cache.dtype, block_dim, *((cache.shape[dim], cache.stride(dim)) for dim in others))


def _places(layer_names: Sequence[str]) -> dict[str, int]:
    """Numbers the attention layers within each decoder layer, and returns the numbers by layer
    name. Two layers share a scratch cache only if they have the same number.
    """
    seen: Counter[str] = Counter()
    places = {}
    for name in layer_names:
        layer = next((part for part in name.split(".") if part.isdecimal()), name)
        places[name] = seen[layer]
        seen[layer] += 1
    return places
