"""RMS norms that make no float32 copies of their inputs.

`rms_norm` is bit-identical to the plain PyTorch expression, because it adds squares in the order of
torch 2.11's reduction of float32 rows. Lane l of a warp has four sums. It adds the squares of
columns 4 l to 4 l + 3 to these sums, then the squares of the columns 128 further on, and so on.
Then the sums of a lane, and of all lanes, are added as in poc_core/arithmetic/reflect.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from poc_core.arithmetic.reflect import lanes_added

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
    """Returns True if `rms_norm` is bit-identical to PyTorch for x (n, columns). PyTorch adds the
    squares of other shapes in another order.
    """
    rows, columns = x.shape
    return rows >= _LEAST_ROWS and _STRIDE < columns <= _MOST_COLUMNS and columns % 4 == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm of each row of x: x / sqrt(mean(x^2) + eps) * weight.

    `x`: (n, columns), 16-bit, with contiguous columns. Computes in float32. The returned tensor is
    contiguous, and has the dtype of `x`. See `can_norm`.
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
    """Returns total + value^2, rounded once, and `value`.

    `tl.reduce` adds the squares of a row with this function. `total` begins with the first square.
    """
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
    """Returns True if `norm_heads_` supports x (tokens, heads, head size), and is bit-identical to
    vLLM.
    """
    return x.dim() == 3 and x.shape[2] in (64, 128, 256) and x.stride(2) == 1


def norm_heads_(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Writes the RMS norm of each head of x, x / sqrt(mean(x^2) + eps) * weight, to `out`.

    `x`, `out`: (tokens, heads, head size), 16-bit. The results are bit-identical to vLLM 0.25.1,
    because squares are added in the same order. In vLLM, each thread adds the squares of eight
    columns, without rounding the squares. Then neighbouring sums are added in pairs until one sum
    is left.
    """
    tokens, heads, columns = x.shape
    n_rows = tokens * heads
    _head_kernel[(triton.cdiv(n_rows, _HEADS),)](
        out, x, weight, x.stride(0), x.stride(1), heads, n_rows, 1 / columns, eps,
        ROWS=_HEADS, HEAD=columns, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
