"""Tiles of the experts' products in block FP8 for one slice: chat keeps those that vLLM chose.

vLLM's tiles fit few tokens too. At the first large call of a shape others are tried, which divide
the sums as its own do: those whose bits are the same and which take less time are used from then
on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from poc_core import fused
from workers.vllm import compat

logger = logging.getLogger(__name__)

# Tokens from which others than vLLM's tiles are tried.
LEAST = 4096
# A tile of others must take less than this share of the time of vLLM's.
_ENOUGH = 0.98
_TIMES = 3

Tile = dict[str, int]


def _tile(rows: int, columns: int, group: int, warps: int, stages: int) -> Tile:
    return {
        "BLOCK_SIZE_M": rows,
        "BLOCK_SIZE_N": columns,
        "BLOCK_SIZE_K": 128,  # the scales' own: another one divides the sums otherwise
        "GROUP_SIZE_M": group,
        "SPLIT_K": 1,
        "num_warps": warps,
        "num_stages": stages,
    }


TILES: Sequence[Tile] = (
    _tile(128, 128, 32, 8, 3),
    _tile(128, 128, 16, 4, 3),
    _tile(64, 128, 16, 4, 4),
)


class QuickExperts:
    """The tiles of a model, with what their trials found."""

    def __init__(self) -> None:
        self._class = compat.triton_experts()
        self._tiles: dict[Any, Tile | None] = {}  # by shape; None: vLLM's

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Within, vLLM's experts compute with these tiles."""
        if self._class is None:
            yield
            return
        own = self._class.apply
        self._class.apply = lambda experts, *args, **named: self._apply(own, experts, args, named)
        try:
            yield
        finally:
            self._class.apply = own

    def _apply(
        self, own: Callable[..., Any], experts: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        x, w1, output = (named.get(name) for name in ("hidden_states", "w1", "output"))
        if (
            not isinstance(x, Tensor)
            or not isinstance(w1, Tensor)
            or not isinstance(output, Tensor)
            or x.dtype is not torch.float8_e4m3fn
            or experts.block_shape != [128, 128]
            or len(x) < LEAST
            or not fused.is_on(x.device)
        ):
            return own(experts, *args, **named)
        key = (len(x).bit_length(), x.shape[1], w1.shape)
        if key not in self._tiles and not torch.cuda.is_current_stream_capturing():
            self._tiles[key] = self._fastest(lambda: own(experts, *args, **named), output)
        tile = self._tiles.get(key)
        with nullcontext() if tile is None else compat.expert_tile(tile):
            return own(experts, *args, **named)

    def _fastest(self, compute: Callable[[], Any], output: Tensor) -> Tile | None:
        """The fastest tile whose bits are vLLM's own; None: vLLM's."""
        try:
            compute()
            expected, limit_ms, found = output.clone(), _ENOUGH * milliseconds(compute), None
            for tile in TILES:
                with compat.expert_tile(tile):
                    compute()
                    if not torch.equal(output, expected):
                        continue
                    if (taken_ms := milliseconds(compute)) < limit_ms:
                        limit_ms, found = taken_ms, tile
        except Exception as error:
            logger.warning("other tiles of the experts' products cannot be tried: %s", error)
            return None
        logger.info("tiles of the experts' products: %s", found or "vLLM's own")
        return found


def milliseconds(compute: Callable[[], Any]) -> float:
    """The device's time, the shortest of a few."""
    times = []
    for _ in range(_TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)
