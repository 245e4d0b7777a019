"""RMS norms without float32 copies of the rows, bit-identical to the plain expression.

`rms_norm` adds in the order of torch 2.11's reduction of float32 rows. Lane l of a warp adds the
four columns from 4 l, from 4 l + 128 and so on to four sums. The sums are then added as for 16-bit
rows (poc_core/fused/reflect.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from poc_core.fused.reflect import lanes_added

# Columns that torch's warp reads at a time: 32 lanes, four each.
_STRIDE = 128
# torch reads shorter rows one number at a time, and uses other thread blocks for longer rows and
# for fewer rows.
_MOST_COLUMNS, _LEAST_ROWS = 8191, 16
# Rows of one program, which is one warp.
_ROWS = 2
# Heads of one program, which is one warp.
_HEADS = 16


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
    scale = libdevice.rsqrt(lanes_added(lanes, ROWS) * share + eps)[:, None]

    for low in range(0, n_columns, STRIDE):
        inside_columns = low + columns < n_columns
        inside = inside_rows & inside_columns[None, :]
        at = rows[:, None] * stride + (low + columns)[None, :]
        value = tl.load(x + at, inside, other=0.0).to(tl.float32)
        own = tl.load(weight + low + columns, inside_columns, other=0.0).to(tl.float32)
        to = out + rows[:, None] * n_columns + (low + columns)[None, :]
        tl.store(to, (value * scale * own[None, :]).to(out.dtype.element_ty), inside)


def can_norm(x: Tensor) -> bool:
    """Returns True if `rms_norm` adds these rows in torch's order."""
    rows, columns = x.shape
    return rows >= _LEAST_ROWS and _STRIDE < columns <= _MOST_COLUMNS and columns % 4 == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight for rows x (n, columns), 16-bit, with contiguous
    columns. Computes in float32. The result is contiguous, and has x's dtype. See `can_norm`.
    """
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _norm_kernel[(triton.cdiv(rows, _ROWS),)](
        out, x, weight, x.stride(0), rows, columns, 1 / columns, eps,
        ROWS=_ROWS, STRIDE=_STRIDE, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _squares_added(total, _value, _square, value):
    """Adds the square of the next number to `total`, which begins with the first square."""
    return tl.fma(value, value, total), value


@triton.jit
def _head_kernel(
    out, x, weight, token_stride, head_stride, n_heads, n_rows, share, eps,
    ROWS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (rows < n_rows)[:, None, None]
    columns = tl.arange(0, HEAD // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    token = rows // n_heads
    at = (token * token_stride + (rows - token * n_heads) * head_stride)[:, None, None] + columns
    value = tl.load(x + at, inside, other=0.0).to(tl.float32)
    sums, _ = tl.reduce((value * value, value), 2, _squares_added)
    if HEAD == 256:
        first, second = tl.split(tl.reshape(sums, [ROWS, 16, 2]))
        sums = first + second
    if HEAD >= 128:
        first, second = tl.split(tl.reshape(sums, [ROWS, 8, 2]))
        sums = first + second
    first, second = tl.split(tl.reshape(sums, [ROWS, 4, 2]))
    first, second = tl.split(tl.reshape(first + second, [ROWS, 2, 2]))
    first, second = tl.split(first + second)
    scale = libdevice.rsqrt((first + second) * share + eps)[:, None, None]
    own = tl.load(weight + columns).to(tl.float32)
    to = out + rows[:, None, None] * HEAD + columns
    tl.store(to, (value * scale * own).to(out.dtype.element_ty), inside)


def can_norm_heads(x: Tensor) -> bool:
    """Returns True if `norm_heads_` supports x (tokens, heads, n) and adds in vLLM's order."""
    return x.dim() == 3 and x.shape[2] in (64, 128, 256) and x.stride(2) == 1


def norm_heads_(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Writes x / sqrt(mean(x^2) + eps) * weight of each head of x (tokens, heads, n), 16-bit, to
    out.

    The result is bit-identical to vLLM 0.25.1. In vLLM, a thread adds the unrounded squares of
    eight columns. Then neighbouring sums are added, then pairs of these sums, and so on.
    """
    tokens, heads, columns = x.shape
    n_rows = tokens * heads
    _head_kernel[(triton.cdiv(n_rows, _HEADS),)](
        out, x, weight, x.stride(0), x.stride(1), heads, n_rows, 1 / columns, eps,
        ROWS=_HEADS, HEAD=columns, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
