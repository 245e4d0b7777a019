# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, type-arg, untyped-decorator"
"""Householder reflection of a layer's outputs in one pass over memory (protocol.md, section 2.2)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _reflect_kernel(first, second, v, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    dtype = v.dtype.element_ty
    unit = tl.load(v + columns, inside, other=0.0).to(tl.float32)
    x_at = (first if tl.program_id(1) == 0 else second) + row * hidden + columns
    x = tl.load(x_at, inside, other=0.0).to(tl.float32)
    # Every step is rounded to the model's dtype, as torch's operations are; the sum is taken in float32.
    products = (x * unit).to(dtype).to(tl.float32)
    twice = (2.0 * tl.sum(products, 0).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    moved = (twice * unit).to(dtype).to(tl.float32)
    tl.store(x_at, (x - moved).to(dtype), inside)


def reflect_(terms: list[Tensor], v: Tensor) -> None:
    """One or two tensors (..., hidden), reflected by the unit vector v (hidden,) in place; all of one dtype and size,
    and contiguous."""
    hidden = v.shape[0]
    rows = terms[0].numel() // hidden
    block = triton.next_power_of_2(hidden)
    _reflect_kernel[(rows, len(terms))](
        terms[0], terms[-1], v, hidden, BLOCK=block, num_warps=min(16, max(1, block // 512))
    )


def can_reflect(terms: list[Tensor], v: Tensor) -> bool:
    """Whether `reflect_` takes these tensors."""
    apart = len({x.data_ptr() for x in terms}) == len(terms)
    return (
        1 <= len(terms) <= 2
        and apart
        and all(x.dtype is v.dtype and x.is_contiguous() and x.numel() == terms[0].numel() > 0 for x in terms)
    )
