"""Where the tokens of a micro-batch lie in the scratch KV cache, and what attention must know of it."""

from __future__ import annotations

from typing import Any

import torch

from workers.vllm import cache_compat
from workers.vllm.kv_isolation import FIRST_BLOCK, ScratchCaches


class Layout:
    """Where a batch of `n` sequences of `seq_len` tokens lies: the same for every batch of that shape."""

    def __init__(self, caches: ScratchCaches, n: int, seq_len: int, device: torch.device) -> None:
        starts = torch.arange(0, (n + 1) * seq_len, seq_len, dtype=torch.int32)
        lengths = torch.full((n,), seq_len, dtype=torch.int32)
        offsets = torch.arange(seq_len, dtype=torch.int64)
        self._groups = caches.groups
        self.n_tokens = n * seq_len
        self.positions = offsets.repeat(n).to(device)
        self._fields = {
            "query_start_loc": starts.to(device),
            "query_start_loc_cpu": starts,
            "seq_lens": lengths.to(device),
            "seq_lens_cpu_upper_bound": lengths,
            "_seq_lens_cpu": lengths,
            "_num_computed_tokens_cpu": torch.zeros_like(lengths),
            "num_reqs": n,
            "num_actual_tokens": n * seq_len,
            "max_query_len": seq_len,
            "max_seq_len": seq_len,
            "causal": True,
            "is_prefilling": torch.ones(n, dtype=torch.bool),
            "positions": self.positions,
        }
        self._tables: list[torch.Tensor] = []  # a group's blocks, (n, blocks per sequence) int32
        self.slot_mapping: dict[str, torch.Tensor] = {}  # a layer's slot of every token, (n * seq_len,) int64
        for group in caches.groups:
            per_sequence = group.blocks_per_sequence(seq_len)
            first_blocks = FIRST_BLOCK + per_sequence * torch.arange(n)
            blocks = first_blocks[:, None] + torch.arange(per_sequence)
            # A state's tokens have no slots of their own.
            slots = torch.zeros(n * seq_len, dtype=torch.int64)
            if group.is_state:
                # As wide as the state's table gets where vLLM keeps checkpoints of it: all are this one.
                blocks = blocks.expand(n, cache_compat.state_table_width(group.group, seq_len))
            else:
                slots = (first_blocks[:, None] * group.block_size + offsets).view(-1)
            self._tables.append(blocks.to(device, torch.int32).contiguous())
            self.slot_mapping.update(dict.fromkeys(group.layer_names, slots.to(device)))

    def metadata(self) -> dict[str, Any]:
        """Attention metadata by layer name; anew for each slice, as builders reuse buffers that chat steps fill."""
        by_layer: dict[str, Any] = {}
        for group, table in zip(self._groups, self._tables, strict=True):
            slots = self.slot_mapping[group.layer_names[0]]
            metadata = cache_compat.build_attention_metadata(
                group.group, block_table_tensor=table, slot_mapping=slots, **self._fields
            )
            by_layer.update(dict.fromkeys(group.layer_names, metadata))
        return by_layer
