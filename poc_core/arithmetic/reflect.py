"""Householder reflection of a layer's outputs in one kernel (protocol.md, section 2.2).

The results are bit-identical to the plain PyTorch expression, because the kernel adds in the order
in which torch 2.11 reduces 16-bit rows. This order was found by experiments. A warp of 32 lanes
computes a row. Each lane has eight sums. Lane l adds the products of columns 8 l to 8 l + 7 to
these sums, then the products of the columns 256 further on, and so on. Then the lane adds its eight
sums in order. Then the sums of lanes 16 apart are added, then of lanes 8 apart, and so on. If
another release of torch adds in another order, sums differ in the last bits of float32, which
changes about one row in ten thousand.
"""

import triton
import triton.language as tl
from torch import Tensor

# Columns that torch's warp reads at a time: 32 lanes, eight each.
_STRIDE = 256
# torch uses other thread blocks for rows of more columns, and for fewer rows.
_MOST_COLUMNS = 8191
_LEAST_ROWS = 16


@triton.jit
def lanes_added(lanes, ROWS: tl.constexpr):
    """Returns the sum of each row of lanes (ROWS, 32), added in the order of torch's warps:
    (ROWS,).
    """
    low, high = tl.split(tl.permute(tl.reshape(lanes, [ROWS, 2, 16]), [0, 2, 1]))
    low, high = tl.split(tl.permute(tl.reshape(low + high, [ROWS, 2, 8]), [0, 2, 1]))
    low, high = tl.split(tl.permute(tl.reshape(low + high, [ROWS, 2, 4]), [0, 2, 1]))
    low, high = tl.split(tl.permute(tl.reshape(low + high, [ROWS, 2, 2]), [0, 2, 1]))
    low, high = tl.split(low + high)
    return low + high


@triton.jit
def _reflect_kernel(first, second, v, HIDDEN: tl.constexpr, STRIDE: tl.constexpr):
    x = first if tl.program_id(1) == 0 else second
    dtype = v.dtype.element_ty
    columns = tl.arange(0, STRIDE)[None, :]
    row_at = x + tl.program_id(0).to(tl.int64) * HIDDEN

    # The complete row is loaded at once, and stays in registers until it is written.
    values = ()
    for low in tl.static_range(0, HIDDEN, STRIDE):
        values += (tl.load(row_at + low + columns, low + columns < HIDDEN, other=0.0),)
    # Each step is rounded to the model's dtype, as in torch; the sum is in float32.
    sums = tl.zeros([1, STRIDE], tl.float32)
    for low in tl.static_range(0, HIDDEN, STRIDE):
        unit = tl.load(v + low + columns, low + columns < HIDDEN, other=0.0).to(tl.float32)
        sums += (values[low // STRIDE].to(tl.float32) * unit).to(dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(sums, [1, 32, 2, 2, 2]))
    sum04, sum26 = tl.split(even)
    sum15, sum37 = tl.split(odd)
    sum0, sum4 = tl.split(sum04)
    sum1, sum5 = tl.split(sum15)
    sum2, sum6 = tl.split(sum26)
    sum3, sum7 = tl.split(sum37)
    lanes = sum0 + sum1 + sum2 + sum3 + sum4 + sum5 + sum6 + sum7
    total = lanes_added(lanes, 1).to(dtype).to(tl.float32)
    twice = (2.0 * total).to(dtype).to(tl.float32)[:, None]

    for low in tl.static_range(0, HIDDEN, STRIDE):
        unit = tl.load(v + low + columns, low + columns < HIDDEN, other=0.0).to(tl.float32)
        moved = (twice * unit).to(dtype).to(tl.float32)
        value = values[low // STRIDE].to(tl.float32)
        tl.store(row_at + low + columns, (value - moved).to(dtype), low + columns < HIDDEN)


def reflect_(terms: list[Tensor], v: Tensor) -> None:
    """Reflects one or two tensors (..., hidden) by v (hidden,), in place. Call it only if
    `can_reflect` returns True.
    """
    hidden = v.shape[0]
    rows = terms[0].numel() // hidden
    # Without fusion, because the product and the difference are rounded separately.
    _reflect_kernel[(rows, len(terms))](
        terms[0], terms[-1], v, HIDDEN=hidden, STRIDE=_STRIDE, num_warps=1, enable_fp_fusion=False
    )


def can_reflect(terms: list[Tensor], v: Tensor) -> bool:
    """Returns True if `reflect_` supports these tensors, and is bit-identical to the plain PyTorch
    expression.
    """
    hidden = v.shape[0]
    return (
        1 <= len(terms) <= 2
        and _STRIDE <= hidden <= _MOST_COLUMNS
        and hidden % 8 == 0  # otherwise torch reads a row's first columns one by one
        and v.element_size() == 2
        and terms[0].numel() >= _LEAST_ROWS * hidden
        and len({x.data_ptr() for x in terms}) == len(terms)
        and all(
            x.dtype is v.dtype and x.is_contiguous() and x.numel() == terms[0].numel()
            for x in terms
        )
    )
