"""Where the tokens of each pass of a micro-batch lie: in caches that all share, or in a place
of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from workers.vllm.chains.kept_caches import KeptCaches
from workers.vllm.forward.kv_isolation import ScratchCaches
from workers.vllm.forward.layout import BlockTables, Layout, ReadyLayouts
from workers.vllm.forward.micro_batch import UnderWay


class Whereabouts:
    def __init__(self, scratch: ScratchCaches, kept: KeptCaches, device: torch.device) -> None:
        self._scratch = scratch
        self._kept = kept
        self._device = device
        self._layouts = ReadyLayouts(scratch.groups, device)

    def of(self, under_way: UnderWay, step: int) -> tuple[Layout, AbstractContextManager[None]]:
        """Of one pass, and what binds the caches; a micro-batch with steps takes its place with
        the first one.
        """
        batch, n = under_way.batch, len(under_way.batch.nonces)
        if not batch.shape.steps:
            rows = batch.shape.rows
            return self._layouts.of(n, rows), self._scratch.bound(n, rows)
        if under_way.place is None or under_way.tables is None:
            under_way.place = self._kept.take(n, batch.shape.positions)
            under_way.tables = BlockTables(
                self._scratch.groups, n, batch.shape.positions, self._device
            )
        positions = batch.positions(step)
        if not batch.is_step(step):
            layout = Layout(under_way.tables.part(batch.order.members(step)), positions)
        elif under_way.layout is None:
            layout = under_way.layout = Layout(
                under_way.tables, positions, most=batch.shape.positions
            )
        else:
            layout = under_way.layout
            layout.move_to(positions.start)
        return layout, self._kept.bound(under_way.place)
