"""Makes Marlin's 4-bit experts (DeepSeek-V4, Kimi-K2) reproducible: sorts each expert's rows."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poc_core.arithmetic import fused
from workers.vllm.kernels.trial import OTHER_BITS, Trial, is_right

MARLIN = "_moe_C::moe_wna16_marlin_gemm"
# Names of its arguments in all of vLLM's releases; their positions differ.
_ROWS, _EXPERTS, _N_USED, _BLOCK = (
    "sorted_token_ids",
    "expert_ids",
    "num_tokens_past_padded",
    "moe_block_size",
)


class OrderedRows:
    """A wrapper of Marlin's matrix product that first sorts the row indices of each expert. The two
    products of a layer use the same row indices, which are sorted only once. The fused sorting
    kernel is used for a shape only if its first result equals that of torch's sorting.
    """

    def __init__(self, own: Any, names: Sequence[str]) -> None:
        """`own`: Marlin's operation. `names`: its arguments. ValueError if one is missing."""
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
        """Returns the row indices, sorted unless the kernel is known to sort this shape wrongly."""
        # imported here: Triton comes with CUDA builds
        from workers.vllm.kernels.row_order import in_order

        def why_not() -> str:
            expected = sorted_rows(rows, experts, int(n_used), block)
            found = in_order(rows, experts, n_used, block)
            return "" if torch.equal(found, expected) else OTHER_BITS

        def find() -> bool:
            return is_right(f"ordering {len(rows)} rows of experts", why_not)

        is_ordered = self._is_right.of((len(rows), block), find)
        return in_order(rows, experts, n_used, block) if is_ordered else rows


def sorted_rows(rows: Tensor, experts: Tensor, n_used: int, block: int) -> Tensor:
    """Returns the row indices `rows`, with those of each expert in ascending order. Does not change
    the indices after the first `n_used`. `experts`: the expert of each block of `block` rows.
    """
    of_block = experts[: n_used // block]
    is_next = torch.ones_like(of_block, dtype=torch.int64)
    is_next[1:] = of_block[1:] != of_block[:-1]
    of_row = is_next.cumsum(0).repeat_interleave(block)
    order = (of_row * (int(rows.max()) + 1) + rows[:n_used]).argsort()
    return torch.cat([rows[:n_used][order], rows[n_used:]])
