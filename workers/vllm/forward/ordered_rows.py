"""Marlin's experts (4 bits, as DeepSeek-V4's and Kimi-K2's) with the same bits each time: their
rows are put in order first. Chat keeps vLLM's own order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from poc_core import fused

MARLIN = "_moe_C::moe_wna16_marlin_gemm"
# What its arguments are called, by vLLM's releases alike, at other places.
_ROWS, _EXPERTS, _N_USED, _BLOCK = (
    "sorted_token_ids",
    "expert_ids",
    "num_tokens_past_padded",
    "moe_block_size",
)


class OrderedRows:
    """The products, of rows in order. A layer has two of the same rows, ordered once."""

    def __init__(self, own: Any, names: Sequence[str]) -> None:
        """`names`: of the operation's arguments. ValueError: they are others."""
        self._own = own
        self._at = [names.index(name) for name in (_ROWS, _EXPERTS, _N_USED, _BLOCK)]
        self._last: tuple[weakref.ref[Tensor], Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named or max(self._at) >= len(args) or not fused.is_on(args[0].device):
            return self._own(*args, **named)
        rows, experts, n_used, block = (args[at] for at in self._at)
        if self._last is None or self._last[0]() is not rows:
            from poc_core.fused.row_order import in_order  # here: Triton comes with CUDA

            self._last = weakref.ref(rows), in_order(rows, experts, n_used, block)
        first = self._at[0]
        return self._own(*args[:first], self._last[1], *args[first + 1 :])
