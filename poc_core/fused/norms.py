"""What surrounds the sum in a norm over whole rows, without copies of the rows in float32.

The sum stays torch's: the results have the bits of the plain expression, whose other steps work on
each number alone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, type-arg, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of one program.
_COLUMNS = 2048
_WARPS = 8


@triton.jit
def _squares_kernel(out, x, stride, n_columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n_columns
    value = tl.load(x + row * stride + columns, inside, other=0.0).to(tl.float32)
    tl.store(out + row * n_columns + columns, value * value, inside)


@triton.jit
def _scaled_kernel(out, x, scales, weight, stride, n_columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n_columns
    value = tl.load(x + row * stride + columns, inside, other=0.0).to(tl.float32)
    own = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    scaled = value * tl.load(scales + row) * own
    tl.store(out + row * n_columns + columns, scaled.to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of rows x (n, columns), 16 bits a number, whose columns
    are contiguous: computed in float32, contiguous, in x's dtype."""
    rows, columns = x.shape
    grid = (rows, triton.cdiv(columns, _COLUMNS))
    options = {"COLUMNS": _COLUMNS, "num_warps": _WARPS, "enable_fp_fusion": False}
    squares = torch.empty(rows, columns, dtype=torch.float32, device=x.device)
    _squares_kernel[grid](squares, x, x.stride(0), columns, **options)
    scales = torch.rsqrt(squares.mean(dim=-1) + eps)
    del squares
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _scaled_kernel[grid](out, x, scales, weight, x.stride(0), columns, **options)
    return out
