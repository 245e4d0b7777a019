"""Matrix products of mixture-of-experts layers in 8-bit floats, with a scale per block of 128.

Sums are computed as in vLLM's kernel: the tensor cores sum 128 columns. This sum is multiplied by
the scales of the row and of the weights, and added in float32. Two things differ from vLLM's
kernel. Rows are sorted by expert, so that the tensor memory accelerator can read complete blocks.
The activation and its quantisation run before the first product is written to memory, which saves
writing and reading four times as many bytes. The results are bit-identical to those of separate
kernels: the first product rounded to bfloat16, and then either `silu_and_quantise_`
(workers/vllm/kernels/quantise.py) or vLLM's activation and quantisation.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.vllm.kernels.experts import Rows, block_at
from workers.vllm.kernels.experts import rows_by_expert as rows_by_expert
from workers.vllm.kernels.quantise import GROUP, quantised, rounded_silu, silu

# Compute capability of the GPUs on which these kernels were verified, and the alignment in bytes
# that their tensor memory accelerator requires.
_HOPPER, _ALIGNED = 9, 16
# Numbers of groups of columns that `block_down.multiply_` can sum with its memory.
DOWN_STEPS = range(4, 9)


class Gates(NamedTuple):
    """The options of vLLM's activation silu(gate) * up, which follows the first product."""

    # True: scales are rounded up to powers of two, and the activation is rounded to bfloat16.
    powers: bool
    # Gates are clamped to at most `limit`, and `up` to -limit .. limit; 0: no clamping.
    limit: float = 0.0


class Tile(NamedTuple):
    """The division of a matrix product into blocks, and Triton's launch options."""

    rows: int  # rows of a block
    wide: bool  # True if two groups of columns are summed at a time
    near: int  # number of blocks of rows that run together and share weights
    warps: int
    stages: int


class Quantised(NamedTuple):
    """A tensor in float8_e4m3fn, and its scales in float32.

    Activations (n, k) have one scale for each 128 columns of a row: scales (n, k / 128). Weights
    (experts, m, k) have one scale for each block of 128 x 128: scales (experts, m / 128, k / 128).
    """

    numbers: Tensor
    scales: Tensor


@triton.jit
def _scaled_sum(found, part, weights, by_row, by_column):
    """Returns found + (part @ weights.T) * by_row * by_column, with the same roundings as in vLLM's
    kernel.
    """
    scaled = tl.dot(part, weights.T) * by_row
    return tl.fma(scaled, by_column + tl.zeros_like(scaled), found)


@triton.jit(do_not_specialize=["n_rows"])  # n_rows varies; each specialisation is compiled
def _product_kernel(
    x, x_scales, weights, scales, out, out_scales, share, ids, experts, n_ids,
    n_columns, depth, n_rows, x_stride, x_scale_row, x_scale_column,
    scale_expert, scale_row, scale_column, out_stride, out_scale_row, out_scale_column,
    A_TOKEN: tl.constexpr, OPENS: tl.constexpr, ROWS: tl.constexpr, NEAR: tl.constexpr,
    WIDE: tl.constexpr, POWERS: tl.constexpr, LIMIT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    n_high = tl.load(n_ids) // ROWS
    # A block has a group of columns of gates and the same group of `up`, or else one group or two
    # neighbouring groups.
    n_wide = n_columns // (2 * GROUP) if OPENS or WIDE else n_columns // GROUP
    group = tl.arange(0, GROUP)
    # A program computes one block. Without the loop Triton 3.6 spills registers on Hopper.
    for block in range(tl.program_id(0), n_high * n_wide, tl.num_programs(0)):
        row_block, column_block = block_at(block, n_high, n_wide, NEAR)
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
    """Computes the first product of an MoE layer and its activation silu(gate) * up, quantises the
    result, and writes it to `out`.

    The product is rounded to bfloat16 before the activation. `out`: (rows_by_expert(rows,
    tile.rows), m), in the order of `rows.ids`. `x`: (n, k). `weights`: (experts, 2 m, k); the first
    m rows of an expert are for gates, the other m rows for `up`. `a_token`: the number of experts
    per row of x.
    """
    _run(out, x, weights, None, rows, a_token, tile, gates)


def multiply_(
    out: Tensor, x: Quantised, weights: Quantised, share: Tensor, rows: Rows, tile: Tile
) -> None:
    """Computes the second product of an MoE layer, and writes it to out (n, m) in 16 bits.

    `x`: (rows_by_expert(rows, tile.rows), k), in the order of `rows.ids`. `weights`: (experts, m,
    k). `share`: (n,), the router's weight for each row of `out`. The row's sums are multiplied by
    this weight in float32.
    """
    _run(out, x, weights, share, rows, 1, tile, Gates(False))


def _run(
    out: Quantised | Tensor, x: Quantised, weights: Quantised, share: Tensor | None, rows: Rows,
    a_token: int, tile: Tile, gates: Gates,
) -> None:  # fmt: skip
    """Launches the kernel. If `out` is a Quantised, the kernel computes the first product and its
    activation, otherwise the second product.
    """
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
    """Returns a tensor descriptor, by which the tensor memory accelerator reads `numbers` (n, k) in
    blocks of `rows` rows and 128 columns.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(numbers, [*numbers.shape], [*numbers.stride()], [rows, GROUP])


def can_multiply_down(second: Quantised) -> bool:
    """Returns True if `block_down.multiply_` supports the weights of the second product, and
    `can_multiply` is True.
    """
    return second.numbers.shape[2] // GROUP in DOWN_STEPS


def can_multiply(x: Quantised, first: Quantised, second: Quantised) -> bool:
    """Returns True if `open_gates_` and `multiply_` support these tensors on this GPU.

    `x`: (n, k). `first`: (experts, 2 m, k), the weights of the first product. `second`: (experts,
    k, m), the weights of the second product. Does not check that this rank has all experts, which
    both functions require.
    """
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
