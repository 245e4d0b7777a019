"""Locates a micro-batch's tokens in the caches: block tables, slots and attention metadata."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from cachetools import LRUCache

from poc_core.schemes.base import Batch
from workers.vllm.forward.kv_isolation import FIRST_BLOCK, ScratchCaches, ScratchGroup
from workers.vllm.forward.step_caches import Place, StepCaches
from workers.vllm.release import kv_caches

# Complete and last micro-batches of a few jobs.
_LAYOUTS_KEPT = 8


class BlockTables:
    """The cache blocks of `n` sequences, in each group of layers. `rows`: the number of a
    sequence's tokens in the first forward pass. `capacity`: the largest number of a sequence's
    tokens.
    """

    def __init__(
        self, groups: Sequence[ScratchGroup], n: int, rows: int, capacity: int, device: torch.device
    ) -> None:
        self.groups = groups
        self.device = device
        self.tables: list[torch.Tensor] = []  # a group's blocks, (n, blocks per sequence) int32
        # A group's first slot of each sequence, (n, 1) int64.
        self.first_slots: list[torch.Tensor] = []
        for group in groups:
            per_sequence = group.blocks_per_sequence(capacity)
            first = FIRST_BLOCK + per_sequence * torch.arange(n)
            blocks = first[:, None] + torch.arange(per_sequence)
            if group.is_state:
                # vLLM's table has a column for each checkpoint of a state. All columns name the
                # state's block, except that checkpoints of the first forward pass go to the null
                # block, because they would overwrite the state.
                width = kv_caches.state_table_width(group.group, capacity)
                blocks = blocks.repeat(1, width)
                blocks[:, : kv_caches.checkpoints(group.group, rows)] = 0
            self.tables.append(blocks.to(device, torch.int32).contiguous())
            self.first_slots.append((first[:, None] * group.block_size).to(device))

    @property
    def n(self) -> int:
        return len(self.first_slots[0]) if self.first_slots else 0

    def part(self, members: range) -> BlockTables:
        """Returns the block tables of the sequences whose indices are in `members`."""
        part = copy.copy(self)
        rows = slice(members.start, members.stop)
        part.tables = [table[rows] for table in self.tables]
        part.first_slots = [first[rows] for first in self.first_slots]
        return part

    def slots(self, index: int, positions: torch.Tensor) -> torch.Tensor:
        """Returns the cache slots of `positions` (k,) in each sequence, int64 (n * k,). `index`:
        the number of the group of layers.
        """
        if self.groups[index].is_state:  # tokens of a state have no separate slots
            return torch.zeros(self.n * len(positions), dtype=torch.int64, device=self.device)
        return (self.first_slots[index] + positions).view(-1)


class Layout:
    """The positions that one forward pass computes in each sequence, and their slots in the caches.
    All batches of the same shape can use the same layout. Creating a layout does not wait for the
    device. `most`: the largest sequence length that `move_to` will set.
    """

    def __init__(self, tables: BlockTables, positions: range, most: int | None = None) -> None:
        n, rows, end, device = tables.n, len(positions), positions.stop, tables.device
        starts = torch.arange(0, n * rows + 1, rows, dtype=torch.int32)
        self._lengths = torch.full((n,), end, dtype=torch.int32)
        self._done = torch.full((n,), positions.start, dtype=torch.int32)
        self._device_lengths = torch.full((n,), end, dtype=torch.int32, device=device)
        offsets = torch.arange(positions.start, end, dtype=torch.int64, device=device)
        self._tables = tables
        self.n_tokens = n * rows
        self.positions = offsets.repeat(n)
        self._fields = {
            "query_start_loc": torch.arange(
                0, n * rows + 1, rows, dtype=torch.int32, device=device
            ),
            "query_start_loc_cpu": starts,
            "seq_lens": self._device_lengths,
            "seq_lens_cpu_upper_bound": self._lengths,
            "_seq_lens_cpu": self._lengths,
            "_num_computed_tokens_cpu": self._done,
            "num_reqs": n,
            "num_actual_tokens": n * rows,
            "max_query_len": rows,
            "max_seq_len": most or end,
            "causal": True,
            "is_prefilling": torch.full((n,), positions.start == 0, dtype=torch.bool),
            "positions": self.positions,
        }
        self._slots = [tables.slots(index, offsets) for index in range(len(tables.groups))]
        self._metadata: dict[str, Any] = {}  # by layer
        self._builds: int | None = None  # kv_caches.n_builds when the metadata was built
        # A layer's slot of every token, (n * rows,) int64.
        self.slot_mapping: dict[str, torch.Tensor] = {}
        for group, slots in zip(tables.groups, self._slots, strict=True):
            self.slot_mapping.update(dict.fromkeys(group.layer_names, slots))

    def move_to(self, position: int) -> None:
        """Moves a layout with one position per sequence to another position, in place."""
        assert len(self.positions) == self._tables.n, (
            "a layout of several positions stays where it is"
        )
        self._builds = None
        self.positions.fill_(position)
        for lengths in (self._lengths, self._device_lengths):
            lengths.fill_(position + 1)
        self._done.fill_(position)
        for index, slots in enumerate(self._slots):
            slots.copy_(self._tables.slots(index, self.positions[:1]))

    def metadata(self) -> dict[str, Any]:
        """Returns the attention metadata by layer. The metadata is reused until `move_to` is
        called, or until a chat step overwrites the buffers of vLLM's metadata builders. Building it
        again can take longer than computing a layer (GLM-5.3-Flash).
        """
        groups = [one.group for one in self._tables.groups]
        if self._builds != kv_caches.n_builds(groups):
            self._metadata = self._build()
            self._builds = kv_caches.n_builds(groups)
        return self._metadata

    def _build(self) -> dict[str, Any]:
        by_layer: dict[str, Any] = {}
        for group, table, slots in zip(
            self._tables.groups, self._tables.tables, self._slots, strict=True
        ):
            metadata = kv_caches.build_attention_metadata(
                group.group, block_table_tensor=table, slot_mapping=slots, **self._fields
            )
            by_layer.update(dict.fromkeys(group.layer_names, metadata))
        return by_layer


@dataclass
class DeviceBatch:
    """A micro-batch in progress on this rank's device."""

    batch: Batch
    # Tensors that one slice passes to the next, each (rows of the pass, hidden).
    state: dict[str, torch.Tensor] | None = None
    # The current pass and its token ids, if the model needs some.
    token_ids: tuple[int, torch.Tensor] | None = None
    # Caches of a micro-batch with decode steps, from its first slice on.
    place: Place | None = None
    tables: BlockTables | None = None
    layout: Layout | None = None  # layout of the decode steps


class Whereabouts:
    """Finds the layout and the caches of each pass. Recently used layouts are cached."""

    def __init__(self, scratch: ScratchCaches, kept: StepCaches, device: torch.device) -> None:
        self._scratch = scratch
        self._kept = kept
        self._device = device
        self._layouts: LRUCache[tuple[int, int], Layout] = LRUCache(_LAYOUTS_KEPT)

    def of(self, held: DeviceBatch, step: int) -> tuple[Layout, AbstractContextManager[None]]:
        """Returns the layout of a pass, and a context that binds the pass's caches. The first pass
        of a micro-batch with decode steps also reserves the caches of these steps.
        """
        order = held.batch.order
        n, shape, positions = order.n, order.shape, order.positions(step)
        if not shape.steps:
            ready = self._layouts.get((n, shape.rows))
            if ready is None:
                tables = BlockTables(self._scratch.groups, n, shape.rows, shape.rows, self._device)
                ready = self._layouts[n, shape.rows] = Layout(tables, range(shape.rows))
            return ready, self._scratch.bound(n, shape.rows)
        if held.place is None or held.tables is None:
            held.place = self._kept.take(n, shape.positions)
            held.tables = BlockTables(
                self._kept.groups, n, shape.rows, shape.positions, self._device
            )
        if not order.is_step(step):
            layout = Layout(held.tables.part(order.members(step)), positions)
        elif held.layout is None:
            layout = held.layout = Layout(held.tables, positions, most=shape.positions)
        else:
            layout = held.layout
            layout.move_to(positions.start)
        return layout, self._kept.bound(held.place)
