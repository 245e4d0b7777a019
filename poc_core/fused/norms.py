"""Norms over whole rows without copies of the rows in float32, with the plain expression's bits.

`rms_norm` adds in the order of torch 2.11's reduction of float32 rows, like that of 16-bit ones
(poc_core/fused/reflect.py): lane l of a warp takes the four columns from 4 l, from 4 l + 128 and so
forth, into four sums. `rms_norm_in_steps` leaves the sum to torch; its other steps work on each
number alone, so it has the bits wherever torch adds in another order.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, type-arg, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

# Columns that torch's warp takes at a time: 32 lanes, four each.
_STRIDE = 128
# torch reads shorter rows one number at a time, and gives longer ones and fewer other blocks.
_MOST_COLUMNS, _LEAST_ROWS = 8191, 16
# Rows of one program, a warp.
_ROWS = 2
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


@triton.jit
def _norm_kernel(
    out, x, weight, stride, n_rows, n_columns, share, eps, ROWS: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside_rows = (rows < n_rows)[:, None]
    columns = tl.arange(0, STRIDE)
    sums = tl.zeros([ROWS, STRIDE], tl.float32)
    for low in range(0, n_columns, STRIDE):
        inside = inside_rows & (low + columns < n_columns)[None, :]
        at = x + rows[:, None] * stride + (low + columns)[None, :]
        value = tl.load(at, inside, other=0.0).to(tl.float32)
        sums += value * value
    even, odd = tl.split(tl.reshape(sums, [ROWS, 32, 2, 2]))
    sum0, sum2 = tl.split(even)
    sum1, sum3 = tl.split(odd)
    lanes = sum0 + sum1 + sum2 + sum3
    low_half, high_half = tl.split(tl.permute(tl.reshape(lanes, [ROWS, 2, 16]), [0, 2, 1]))
    low_half, high_half = tl.split(
        tl.permute(tl.reshape(low_half + high_half, [ROWS, 2, 8]), [0, 2, 1])
    )
    low_half, high_half = tl.split(
        tl.permute(tl.reshape(low_half + high_half, [ROWS, 2, 4]), [0, 2, 1])
    )
    low_half, high_half = tl.split(
        tl.permute(tl.reshape(low_half + high_half, [ROWS, 2, 2]), [0, 2, 1])
    )
    low_half, high_half = tl.split(low_half + high_half)
    scale = libdevice.rsqrt((low_half + high_half) * share + eps)[:, None]

    for low in range(0, n_columns, STRIDE):
        inside_columns = low + columns < n_columns
        inside = inside_rows & inside_columns[None, :]
        at = rows[:, None] * stride + (low + columns)[None, :]
        value = tl.load(x + at, inside, other=0.0).to(tl.float32)
        own = tl.load(weight + low + columns, inside_columns, other=0.0).to(tl.float32)
        to = out + rows[:, None] * n_columns + (low + columns)[None, :]
        tl.store(to, (value * scale * own[None, :]).to(out.dtype.element_ty), inside)


def can_norm(x: Tensor) -> bool:
    """Whether `rms_norm` adds these rows as torch does."""
    rows, columns = x.shape
    return rows >= _LEAST_ROWS and _STRIDE < columns <= _MOST_COLUMNS and columns % 4 == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of rows x (n, columns), 16 bits a number, whose columns
    are contiguous: computed in float32, contiguous, in x's dtype. See `can_norm`."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _norm_kernel[(triton.cdiv(rows, _ROWS),)](
        out, x, weight, x.stride(0), rows, columns, 1 / columns, eps,
        ROWS=_ROWS, STRIDE=_STRIDE, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def rms_norm_in_steps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, of any rows."""
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
