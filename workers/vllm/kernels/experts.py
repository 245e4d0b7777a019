"""Matrix products of mixture-of-experts layers in 16 bits: each token's row times its experts'
weights.

Sums are computed as in vLLM's kernel: in float32, in steps of `Tile.depth` columns. Two things
differ from vLLM's kernel. Blocks are complete, so they need no masks. The activation runs before
the first product is written to memory, which saves writing and reading twice as many numbers. On
Hopper and newer GPUs there are also kernels for rows in expert order. They read complete blocks
with the tensor memory accelerator, and each program computes several blocks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.vllm.kernels.quantise import rounded_silu

# The first compute capability with a tensor memory accelerator, and the alignment in bytes that the
# accelerator requires of tensors and their rows.
_HOPPER, _ALIGNED = 9, 16


class Tile(NamedTuple):
    """The division of a matrix product into blocks, and Triton's launch options.

    A block of the result has `rows` x `columns` numbers, and is summed in steps of `depth`.
    `group`: the number of blocks of rows that run together and share weights.
    """

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int


class Rows(NamedTuple):
    """The rows that each block of a product computes, as vLLM's moe_align_block_size gives them."""

    # (blocks * Tile.rows,), int32: token * experts per token + index among the token's experts.
    # Numbers that only complete a block are larger.
    ids: Tensor
    experts: Tensor  # (blocks,), int32: the block's expert; -1 if another rank holds the expert
    n: Tensor  # (1,), int32: the number of `ids` in use


@triton.jit
def block_at(number, n_high, n_wide, NEAR: tl.constexpr):
    """Returns the row and the column of block `number` of n_high * n_wide blocks of a product.
    `NEAR`: the number of rows of blocks that run together and share weights.
    """
    first = number // (NEAR * n_wide) * NEAR
    high = tl.minimum(n_high - first, NEAR)
    place = number % (NEAR * n_wide)
    return first + place % high, place // high


@triton.jit
def _product_kernel(
    x, weights, out, share, ids, experts, n_ids,
    n_columns, depth, n_rows, x_stride, expert_stride, weight_stride, out_stride,
    A_TOKEN: tl.constexpr, OPENS: tl.constexpr, SHARES: tl.constexpr, SORTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    n_high = tl.load(n_ids) // ROWS
    n_wide = n_columns // COLUMNS
    if block >= n_high * n_wide:
        return
    row_block, column_block = block_at(block, n_high, n_wide, GROUP)
    expert = tl.load(experts + row_block).to(tl.int64)
    row = tl.load(ids + row_block * ROWS + tl.arange(0, ROWS))
    inside = (row < n_rows)[:, None]
    row = tl.minimum(row, n_rows - 1)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    if SORTED:
        to, inside = row_block * ROWS + tl.arange(0, ROWS), (row >= 0)[:, None]
    else:
        to = row
    at = out + to.to(tl.int64)[:, None] * out_stride
    if expert == -1:
        if OPENS:
            half = column_block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            nothing = tl.zeros((ROWS, COLUMNS // 2), out.dtype.element_ty)
            tl.store(at + half[None, :], nothing, inside)
        else:
            nothing = tl.zeros((ROWS, COLUMNS), out.dtype.element_ty)
            tl.store(at + column[None, :], nothing, inside)
        return
    # A gate and its `up` are neighbours in a block, so one thread holds both.
    weight_row = column // 2 + column % 2 * (n_columns // 2) if OPENS else column
    step = tl.arange(0, DEPTH)
    x_at = x + (row // A_TOKEN).to(tl.int64)[:, None] * x_stride + step[None, :]
    weight_at = weights + expert * expert_stride + (weight_row * weight_stride)[None, :]
    weight_at += step[:, None]
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(depth // DEPTH):
        found += tl.dot(tl.load(x_at), tl.load(weight_at))
        x_at += DEPTH
        weight_at += DEPTH
    if SHARES:
        found = found * tl.load(share + row)[:, None]
    rounded = found.to(out.dtype.element_ty)
    if OPENS:
        pairs = tl.reshape(rounded.to(tl.float32), (ROWS, COLUMNS // 2, 2))
        gate, up = tl.split(pairs)
        opened = rounded_silu(gate, up, out.dtype.element_ty)
        half = column_block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        tl.store(at + half[None, :], opened.to(out.dtype.element_ty), inside)
    else:
        tl.store(at + column[None, :], rounded, inside)


def product_(
    out: Tensor, x: Tensor, weights: Tensor, share: Tensor | None, rows: Rows, a_token: int,
    tile: Tile, by_expert: bool = False,
) -> None:  # fmt: skip
    """Multiplies each row of x (n, k) by the weights of the row's experts, and writes the products
    to out (n * a_token, m).

    All tensors except `share` are 16-bit with contiguous last dimensions. `weights`: (experts, m,
    k), or (experts, 2 m, k) to write silu(gate) * up; the first m rows of an expert are then for
    gates. `share`: (n * a_token,), the router's weight for each product, which is multiplied in
    float32; None means no multiplication. `a_token`: the number of experts per row of `x`.
    `by_expert`: True if `out` is (rows_by_expert(rows, tile.rows), m), in the order of `rows.ids`.
    See `can_multiply`.
    """
    n_columns, depth = weights.shape[1:]
    blocks = triton.cdiv(rows.ids.numel(), tile.rows) * (n_columns // tile.columns)
    opens = 2 * out.shape[1] == n_columns
    _product_kernel[(blocks,)](
        x, weights, out, share, *rows, n_columns, depth, len(x) * a_token,
        x.stride(0), weights.stride(0), weights.stride(1), out.stride(0),
        A_TOKEN=a_token, OPENS=opens, SHARES=share is not None, SORTED=by_expert,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def can_multiply(x: Tensor, weights: Tensor, tile: Tile) -> bool:
    """Returns True if `product_` supports these tensors: they have 16-bit numbers, and `tile`
    divides the weights into complete blocks.
    """
    return (
        x.dtype == weights.dtype
        and x.element_size() == 2
        and x.dim() == 2
        and x.stride(1) == weights.stride(2) == 1
        and weights.shape[1] % tile.columns == 0
        and weights.shape[2] % tile.depth == 0
    )


def rows_by_expert(rows: Rows, block: int) -> int:
    """Returns the number of rows of a tensor in expert order: the length of `rows.ids`, rounded up
    to a multiple of `block`, the rows of a block.
    """
    return int(triton.cdiv(rows.ids.numel(), block)) * block


@triton.jit
def _by_expert_kernel(
    x, weights, out, share, ids, experts, n_ids, n_columns, depth, n_rows, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    n_high = tl.load(n_ids) // ROWS
    n_wide = n_columns // COLUMNS
    for block in tl.range(tl.program_id(0), n_high * n_wide, PROGRAMS, flatten=True):
        row_block, column_block = block_at(block, n_high, n_wide, GROUP)
        weight_row = tl.load(experts + row_block) * n_columns + column_block * COLUMNS
        found = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, depth, DEPTH):
            rows = x.load([row_block * ROWS, at])
            found = tl.dot(rows, weights.load([weight_row, at]).T, found)
        row = tl.load(ids + row_block * ROWS + tl.arange(0, ROWS))
        inside = (row < n_rows)[:, None]
        row = tl.minimum(row, n_rows - 1)
        found = found * tl.load(share + row)[:, None]
        column = column_block * COLUMNS + tl.arange(0, COLUMNS)
        at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(at, found.to(out.dtype.element_ty), inside)


def product_by_expert_(
    out: Tensor, x: Tensor, weights: Tensor, share: Tensor, rows: Rows, tile: Tile
) -> None:
    """Computes the second product of an MoE layer, and writes it to out (n, m).

    `x`: (rows_by_expert(rows, tile.rows), k), in the order of `rows.ids`. `weights`: (experts, m,
    k). `share`: (n,), the router's weight for each row of `out`, which is multiplied in float32.
    See `can_multiply_by_expert`.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    n_columns, depth = weights.shape[1:]
    flat = weights.view(-1, depth)
    programs = torch.cuda.get_device_properties(out.device).multi_processor_count
    _by_expert_kernel[(programs,)](
        TensorDescriptor(x, [*x.shape], [depth, 1], [tile.rows, tile.depth]),
        TensorDescriptor(flat, [*flat.shape], [depth, 1], [tile.columns, tile.depth]),
        out, share, *rows, n_columns, depth, len(out), out.stride(0),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=tile.group,
        PROGRAMS=programs, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def can_multiply_by_expert(x: Tensor, weights: Tensor) -> bool:
    """Returns True if the GPU's tensor memory accelerator can read these tensors, so that
    `product_by_expert_` supports them.

    Does not check that this rank has all experts, which that function requires.
    """
    return (
        torch.cuda.get_device_capability(x.device)[0] >= _HOPPER
        and x.is_contiguous()
        and weights.is_contiguous()
        and weights.shape[2] * weights.element_size() % _ALIGNED == 0
        and not any(one.data_ptr() % _ALIGNED for one in (x, weights))
    )
