"""vLLM's KV caches, state caches and attention metadata, adapted to each release of vLLM."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

# A block count that no real cache dimension has: marks the block dimension in a backend's shape.
_BLOCK_COUNT_MARK = 1_000_003

# Types of caches that proofs can have separately from chat, and what the caches contain.
_KINDS = {
    "FullAttentionSpec": "tokens",
    "SlidingWindowSpec": "tokens",
    "ChunkedLocalAttentionSpec": "tokens",
    "MLAAttentionSpec": "tokens",
    "SlidingWindowMLASpec": "tokens",
    "MambaSpec": "state",
    "CircularBufferSpec": "state",
    "KpoolTailSpec": "state",
}

# Types of GLM-5.3-Flash's ring buffers of uncompressed keys; the second until 0.31.
_RINGS = {"CircularBufferSpec", "KpoolTailSpec"}

# Number formats of caches that keep everything in the bound tensor.
_CACHE_DTYPES = re.compile(r"auto|b?float16|float32|fp8(_e4m3|_e5m2|_ds_mla)?")

# Attribute in which vLLM's V2 runner stores the state blocks of chat's last step.
_TOLD_STATES = "mamba_aligned_state_indices"

# Attribute that lets DeepSeek-V4's compressor skip a step.
_ENDS_A_BLOCK = "c128_boundary"

# Methods of a builder that fill its buffers, and the attribute that counts their calls.
_BUILD_METHODS = ("build", "update_block_table")
_BUILDS = "_proof_builds"

_METADATA_FIELDS = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}


def attention_groups(runner: Any) -> Iterator[Any]:
    """Yields every attention group of a vLLM model runner, from all of its KV cache groups."""
    for groups in runner.attn_groups:
        yield from groups


def cache_kind(group: Any) -> str | None:
    """Returns "tokens" if a group's caches have blocks of a sequence's tokens, or "state" if they
    have one block per sequence of any length. Returns None if proofs cannot use separate caches of
    this type.

    Types are matched by exact name, because derived types can hold more: an encoder's states, or
    attention sinks that are written once into the cache bound at that time.
    """
    kinds = {_KINDS.get(type(one).__name__) for one in _specs(group.kv_cache_spec)}
    return kinds.pop() if len(kinds) == 1 else None


def _specs(spec: Any) -> list[Any]:
    return [*spec.kv_cache_specs.values()] if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def page_bytes(group: Any, layer_name: str, content: int) -> int:
    """Returns the size in bytes of one block, with padding and alignment, in a cache that only this
    layer uses. `content`: the block's bytes without padding.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[layer_name]
    if kernel_block_size(group) == spec.block_size:
        content = max(content, getattr(spec, "page_size_padded", None) or 0)
    alignment = (
        spec.get_block_stride_alignment() if hasattr(spec, "get_block_stride_alignment") else 1
    )
    return -(-content // alignment) * alignment


def state_table_width(group: Any, seq_len: int) -> int:
    """Returns how many blocks a sequence has in a state cache, including speculative blocks."""
    spec = group.kv_cache_spec
    block_size: int = spec.block_size
    return max(1, -(-seq_len // block_size)) + getattr(spec, "num_speculative_blocks", 0)


def checkpoints(group: Any, first: int) -> int:
    """Returns how many columns of a state cache's block table hold checkpoints after a prefill of
    `first` tokens. In newer releases, the second-last column gets the state at
    a point within the prefill.
    """
    spec = group.kv_cache_spec
    if not getattr(spec, "num_prefill_checkpoint_blocks", 0):
        return 0
    return int((first - 1) // spec.block_size)


def carries_state(group: Any) -> bool:
    """Returns True if a decode step finds each sequence's state in the block that the block table
    names. This holds for gated delta nets (also Kimi's) and ring buffers of uncompressed keys,
    because their kernels locate a sequence only by positions and block table.
    """
    if all(type(one).__name__ in _RINGS for one in _specs(group.kv_cache_spec)):
        return True
    kinds = type(group.get_metadata_builder(0)).__mro__
    return any(kind.__name__ == "GDNAttentionMetadataBuilder" for kind in kinds)


def cache_source(layer: Any) -> str | None:
    """Returns the name of the layer whose cache this layer reads; None if it writes its own."""
    return getattr(layer, "kv_sharing_target_layer_name", None)


def why_not_provable(model: nn.Module, cache_dtype: str) -> str | None:
    """Returns why proofs or chat would be wrong although the self-tests pass, or None."""
    if not _CACHE_DTYPES.fullmatch(cache_dtype):
        return (
            f"--kv-cache-dtype {cache_dtype} keeps its scales in the first cache that it sees,"
            " which cannot be isolated from chat; use auto or fp8"
        )
    if any(
        isinstance(getattr(module, "per_layer_embeddings", None), torch.Tensor)
        for module in model.modules()
    ):
        return (
            f"{type(model).__name__} adds data of chat's last tokens to a proof's inputs;"
            " compute proofs with its text model alone"
        )
    return None


def kernel_block_size(group: Any) -> int:
    """Returns the attention kernel's tokens per block. The cache manager's blocks may be larger."""
    return int(group.get_metadata_builder(0).kv_cache_spec.block_size)


def cache_block_dim(group: Any, cache: torch.Tensor) -> int:
    """Returns the dimension of a cache tensor that counts blocks. Older releases ask the attention
    backend. In newer releases it is the first, because each layer has a separate view.
    """
    shape_of = getattr(group.backend, "get_kv_cache_shape", None)
    if shape_of is None:
        return 0
    spec = group.kv_cache_spec
    shape = shape_of(_BLOCK_COUNT_MARK, kernel_block_size(group), spec.num_kv_heads, spec.head_size)
    if len(shape) != cache.dim():
        raise LookupError(
            f"{group.backend.__name__} names a {len(shape)}-dimensional cache, bound is"
            f" {tuple(cache.shape)}"
        )
    return int(shape.index(_BLOCK_COUNT_MARK))


def n_builds(groups: Sequence[Any]) -> int:
    """Returns how often the groups' builders have built attention metadata since the first call."""
    return sum(_counted(group.get_metadata_builder(0)) for group in groups)


def _counted(builder: Any) -> int:
    if _BUILDS not in vars(builder):
        setattr(builder, _BUILDS, 0)
        for name in _BUILD_METHODS:
            if method := getattr(builder, name, None):
                setattr(builder, name, partial(_build_and_count, builder, method))
    return int(getattr(builder, _BUILDS))


def _build_and_count(builder: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    setattr(builder, _BUILDS, getattr(builder, _BUILDS) + 1)
    return method(*args, **kwargs)


def build_attention_metadata(group: Any, **fields: Any) -> Any:
    """Builds a batch's attention metadata. Ignores `fields` that vLLM's release does not have."""
    common = CommonAttentionMetadata(
        **{name: value for name, value in fields.items() if name in _METADATA_FIELDS}
    )
    # Called on the builder: group.build_metadata of newer releases would map the manager's blocks
    # to kernel blocks, but the scratch cache already uses kernel blocks.
    with _batch_states(group.get_metadata_builder(0), common) as builder:
        common.block_table_tensor = _in_parts(common.block_table_tensor, builder)
        return builder.build(0, common)


def _in_parts(table: torch.Tensor, builder: Any) -> torch.Tensor:
    """Replaces each block in a block table by its parts, if the builder's blocks are larger than
    the kernel's. Needed only for GLM-5.3-Flash's indexer in 0.30 and 0.31.
    """
    part: int | None = getattr(builder, "kernel_block_size", None)
    n, rest = divmod(builder.kv_cache_spec.block_size, part) if part else (1, 0)
    if n == 1 or rest:
        return table
    offsets = torch.arange(n, dtype=table.dtype, device=table.device)
    parts: torch.Tensor = (table[:, :, None] * n + offsets).view(len(table), -1)
    return parts


@contextmanager
def _batch_states(builder: Any, common: Any) -> Iterator[Any]:
    """Yields the builder, changed to use this batch's state blocks. In newer releases, the V2 model
    runner has stored the blocks of chat's last step in the builder.
    """
    if not hasattr(builder, _TOLD_STATES):
        yield builder
        return
    told = getattr(builder, _TOLD_STATES)
    spec = builder.kv_cache_spec
    width = 1 + getattr(spec, "num_speculative_blocks", 0)
    # all columns are the same
    setattr(builder, _TOLD_STATES, common.block_table_tensor[:, -width:])
    try:
        yield builder
    finally:
        setattr(builder, _TOLD_STATES, told)


def of_any_step(metadata: dict[str, Any]) -> dict[str, Any]:
    """Makes a step's metadata (by layer) valid for a CUDA graph at other positions, and returns it.
    Since 0.28, DeepSeek-V4's compressor is skipped if the metadata says that no block is complete.
    """
    for one in metadata.values():
        if getattr(one, _ENDS_A_BLOCK, None) is not None:
            setattr(one, _ENDS_A_BLOCK, None)
    return metadata


def workspaces(alike_on_ranks: bool) -> tuple[int, ...]:
    """Returns the addresses of vLLM's work buffers, or their sizes in bytes if `alike_on_ranks`."""
    try:
        from vllm.v1.worker.workspace import (
            current_workspace_manager,
            is_workspace_manager_initialized,
        )
    except ImportError:
        return ()
    if not is_workspace_manager_initialized():
        return ()
    buffers = vars(current_workspace_manager())["_current_workspaces"]
    return tuple(
        0 if buffer is None else buffer.nbytes if alike_on_ranks else buffer.data_ptr()
        for buffer in buffers
    )
