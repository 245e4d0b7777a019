"""Marlin's experts (4 bits, as DeepSeek-V4's and Kimi-K2's) with the same bits each time: their
rows are put in order first. Chat keeps vLLM's own order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poc_core import fused
from workers.vllm.forward.trial import OTHER_BITS, Trial, is_right

MARLIN = "_moe_C::moe_wna16_marlin_gemm"
# What its arguments are called, by vLLM's releases alike, at other places.
_ROWS, _EXPERTS, _N_USED, _BLOCK = (
    "sorted_token_ids",
    "expert_ids",
    "num_tokens_past_padded",
    "moe_block_size",
)


class OrderedRows:
    """The products, of rows in order. A layer has two of the same rows, ordered once. The kernel is
    used where the first call of a shape found its rows to be those that sorting gives.
    """

    def __init__(self, own: Any, names: Sequence[str]) -> None:
        """`names`: of the operation's arguments. ValueError: they are others."""
        self._own = own
        self._at = [names.index(name) for name in (_ROWS, _EXPERTS, _N_USED, _BLOCK)]
        self._last: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._is_right = Trial[bool]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named or max(self._at) >= len(args) or not fused.is_on(args[0].device):
            return self._own(*args, **named)
        rows, *rest = (args[at] for at in self._at)
        if self._last is None or self._last[0]() is not rows:
            self._last = weakref.ref(rows), self._ordered(rows, *rest)
        first = self._at[0]
        return self._own(*args[:first], self._last[1], *args[first + 1 :])

    def _ordered(self, rows: Tensor, experts: Tensor, n_used: Tensor, block: int) -> Tensor:
        """The rows in order; as they are where the kernel cannot be trusted."""
        from poc_core.fused.row_order import in_order  # here: Triton comes with CUDA

        def why_not() -> str:
            expected = sorted_rows(rows, experts, int(n_used), block)
            found = in_order(rows, experts, n_used, block)
            return "" if torch.equal(found, expected) else OTHER_BITS

        def find() -> bool:
            return is_right(f"ordering {len(rows)} rows of experts", why_not)

        is_ordered = self._is_right.of((len(rows), block), find)
        return in_order(rows, experts, n_used, block) if is_ordered else rows


def sorted_rows(rows: Tensor, experts: Tensor, n_used: int, block: int) -> Tensor:
    """Computes `poc_core.fused.row_order.in_order` by torch's sorting: each expert's rows from the
    smallest to the largest, after the first `n_used` unchanged.
    """
    of_block = experts[: n_used // block]
    is_next = torch.ones_like(of_block, dtype=torch.int64)
    is_next[1:] = of_block[1:] != of_block[:-1]
    of_row = is_next.cumsum(0).repeat_interleave(block)
    order = (of_row * (int(rows.max()) + 1) + rows[:n_used]).argsort()
    return torch.cat([rows[:n_used][order], rows[n_used:]])
