"""Products of a mixture of experts in 8-bit floats with a scale for each block of 128.

The sums are those of vLLM's kernel: the tensor cores' sums of 128 columns, times the row's scale,
times the weights' scale, added in float32. What differs is around them. Rows lie in the order in
which experts take them, so that whole blocks are read by the tensor memory accelerator. Gates are
opened and quantised before the first product is written, which spares writing and reading four
times as many bytes: the bits are those of poc_core/fused/quantise.py on the rounded product, or of
vLLM's activation and then of that.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, type-arg, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from poc_core.fused.experts import Rows
from poc_core.fused.quantise import GROUP, quantised, rounded_silu, silu

# Compute capability of GPUs that have shown these kernels to be right, and to how many bytes what
# their tensor memory accelerator reads is aligned.
_HOPPER, _ALIGNED = 9, 16


class Gates(NamedTuple):
    """How vLLM opens gates."""

    powers: bool  # whether scales are rounded up to powers of two; its activation rounds then
    limit: float = 0.0  # of gates, and of what they open, both ways; 0: none


class Tile(NamedTuple):
    """How a product is divided."""

    rows: int  # of a block
    wide: bool  # whether two groups of columns are summed at a time
    near: int  # blocks of rows that run at a time, and share weights
    warps: int
    stages: int


class Quantised(NamedTuple):
    """Numbers in float8_e4m3fn and their scales in float32: of rows (n, k) by 128 columns, (n, k /
    128); of weights (experts, m, k) by blocks, (experts, m / 128, k / 128)."""

    numbers: Tensor
    scales: Tensor


@triton.jit
def _scaled_sum(found, part, weights, by_row, by_column):
    """found + (part @ weights.T) * by_row * by_column, as vLLM's kernel is compiled."""
    scaled = tl.dot(part, weights.T) * by_row
    return tl.fma(scaled, by_column + tl.zeros_like(scaled), found)


@triton.jit(do_not_specialize=["n_rows"])  # by how many there are
def _product_kernel(
    x, x_scales, weights, scales, out, out_scales, share, ids, experts, n_ids,
    n_columns, depth, n_rows, x_stride, x_scale_row, x_scale_column,
    scale_expert, scale_row, scale_column, out_stride, out_scale_row, out_scale_column,
    A_TOKEN: tl.constexpr, OPENS: tl.constexpr, ROWS: tl.constexpr, NEAR: tl.constexpr,
    WIDE: tl.constexpr, POWERS: tl.constexpr, LIMIT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    n_high = tl.load(n_ids) // ROWS
    # A block's groups of columns: a gate's and what it opens, or one, or two neighbours.
    n_wide = n_columns // (2 * GROUP) if OPENS or WIDE else n_columns // GROUP
    group = tl.arange(0, GROUP)
    # A program has one block; where this is no loop, Triton 3.6 spills registers on Hopper.
    for block in range(tl.program_id(0), n_high * n_wide, tl.num_programs(0)):
        first = block // (NEAR * n_wide) * NEAR
        high = min(n_high - first, NEAR)
        place = block % (NEAR * n_wide)
        row_block, column_block = first + place % high, place // high
        expert = tl.load(experts + row_block)
        by_expert = row_block * ROWS + tl.arange(0, ROWS)
        row = tl.load(ids + by_expert)
        inside = (row < n_rows)[:, None]
        row = tl.minimum(row, n_rows - 1)
        if OPENS:
            column, apart = column_block * GROUP, n_columns // 2
            x_row = (row // A_TOKEN).to(tl.int64)
            x_at = x + x_row[:, None] * x_stride + group[None, :]
        else:
            column, apart = column_block * (2 * GROUP if WIDE else GROUP), GROUP
            x_row = by_expert
        weight_row = expert * n_columns + column
        x_scale_at = x_scales + x_row * x_scale_row
        scale_at = scales + expert * scale_expert + column // GROUP * scale_row
        scales_apart = apart // GROUP * scale_row
        one = tl.zeros((ROWS, GROUP), tl.float32)
        other = tl.zeros((ROWS, GROUP), tl.float32)
        for step in range(depth // GROUP):
            if OPENS:
                part = tl.load(x_at + step * GROUP)
            else:
                part = x.load([row_block * ROWS, step * GROUP])
            by_row = tl.load(x_scale_at + step * x_scale_column)[:, None]
            at = scale_at + step * scale_column
            near = weights.load([weight_row, step * GROUP])
            one = _scaled_sum(one, part, near, by_row, tl.load(at))
            if WIDE:
                far = weights.load([weight_row + apart, step * GROUP])
                other = _scaled_sum(other, part, far, by_row, tl.load(at + scales_apart))
        if OPENS:
            gate = one.to(tl.bfloat16)
            if not WIDE:
                for step in range(depth // GROUP):
                    part = tl.load(x_at + step * GROUP)
                    by_row = tl.load(x_scale_at + step * x_scale_column)[:, None]
                    far = weights.load([weight_row + apart, step * GROUP])
                    scale = tl.load(scale_at + scales_apart + step * scale_column)
                    other = _scaled_sum(other, part, far, by_row, scale)
            gate, up = gate.to(tl.float32), other.to(tl.bfloat16).to(tl.float32)
            if LIMIT > 0:
                gate = tl.minimum(gate, LIMIT)
                up = tl.clamp(up, -LIMIT, LIMIT)
            opened = rounded_silu(gate, up, tl.bfloat16) if POWERS else silu(gate, up)
            number, scale = quantised(opened, POWERS)
            at = out + by_expert.to(tl.int64)[:, None] * out_stride + column + group[None, :]
            tl.store(at, number.to(out.dtype.element_ty))
            tl.store(
                out_scales + by_expert * out_scale_row + column_block * out_scale_column, scale
            )
        else:
            by_share = tl.load(share + row)[:, None]
            at = out + row.to(tl.int64)[:, None] * out_stride + column + group[None, :]
            tl.store(at, (one * by_share).to(out.dtype.element_ty), inside)
            if WIDE:
                tl.store(at + GROUP, (other * by_share).to(out.dtype.element_ty), inside)


def open_gates_(
    out: Quantised, x: Quantised, weights: Quantised, rows: Rows, a_token: int, tile: Tile,
    gates: Gates,
) -> None:  # fmt: skip
    """out (rows_by_expert, m), in the order of `rows.ids`, of x (n, k) and weights (experts, 2 m,
    k), of which the first m rows are gates: silu(gate) * up, rounded to bfloat16 and quantised.

    `a_token`: how many of `rows.ids` a row of x has.
    """
    _run(out, x, weights, None, rows, a_token, tile, gates)


def multiply_(
    out: Tensor, x: Quantised, weights: Quantised, share: Tensor, rows: Rows, tile: Tile
) -> None:
    """out (n, m), 16 bits a number, of x (rows_by_expert, k), in the order of `rows.ids`, and
    weights (experts, m, k); each row's sums times its `share` (n,) in float32."""
    _run(out, x, weights, share, rows, 1, tile, Gates(False))


def _run(
    out: Quantised | Tensor, x: Quantised, weights: Quantised, share: Tensor | None, rows: Rows,
    a_token: int, tile: Tile, gates: Gates,
) -> None:  # fmt: skip
    """Opens gates where `out` is quantised."""
    if isinstance(out, Quantised):
        opens, numbers, scales, scale_strides = True, *out, out.scales.stride()
        n_rows, read = len(x.numbers) * a_token, x.numbers
    else:
        opens, numbers, scales, scale_strides = False, out, None, (0, 0)
        n_rows, read = len(out), _described(x.numbers, tile.rows)
    n_columns, depth = weights.numbers.shape[1:]
    columns = 2 * GROUP if opens or tile.wide else GROUP
    blocks = triton.cdiv(rows.ids.numel(), tile.rows) * (n_columns // columns)
    _product_kernel[(blocks,)](
        read, x.scales, _described(weights.numbers.view(-1, depth), GROUP), weights.scales,
        numbers, scales, share, *rows, n_columns, depth, n_rows, x.numbers.stride(0),
        *x.scales.stride(), *weights.scales.stride(), numbers.stride(0), *scale_strides,
        A_TOKEN=a_token, OPENS=opens, ROWS=tile.rows, NEAR=tile.near, WIDE=tile.wide,
        POWERS=gates.powers, LIMIT=gates.limit, GROUP=GROUP,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _described(numbers: Tensor, rows: int) -> Any:
    """Numbers (n, k) for the tensor memory accelerator, in blocks of so many rows."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(numbers, [*numbers.shape], [*numbers.stride()], [rows, GROUP])


def rows_by_expert(rows: Rows, tile: Tile) -> int:
    """Rows in whole blocks."""
    return int(triton.cdiv(rows.ids.numel(), tile.rows)) * tile.rows


def can_multiply(x: Quantised, first: Quantised, second: Quantised) -> bool:
    """True if the kernels take x (n, k) and weights (experts, 2 m, k) and (experts, k, m) on this
    GPU, with all their scales. No expert may be another rank's."""
    parts = [*zip((x, first, second), (1, GROUP, GROUP), strict=True)]
    n_experts, depth, middle = second.numbers.shape
    return (
        torch.version.cuda is not None
        and torch.cuda.get_device_capability(x.numbers.device)[0] == _HOPPER
        and not any(one.numbers.data_ptr() % _ALIGNED for one in (first, second))
        and first.numbers.shape == (n_experts, 2 * middle, depth)
        and x.numbers.shape[1:] == (depth,)
        and depth % (2 * GROUP) == middle % GROUP == 0
        and all(
            one.numbers.dtype == torch.float8_e4m3fn
            and one.numbers.is_contiguous()
            and one.scales.dtype == torch.float32
            and one.scales.shape == (*rest, rows // block, columns // GROUP)
            for one, block in parts
            for *rest, rows, columns in [one.numbers.shape]
        )
    )
