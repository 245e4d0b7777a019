"""Converts experts' 4-bit weights from vLLM's Marlin layout to plain 16-bit matrices, and
multiplies by them in Marlin's order of sums.

Marlin stores weights in tiles of 64 rows and 16 columns, where products are summed along the
columns. A tile has 128 words of eight 4-bit numbers. The scales of 64 rows have another order than
the rows (vLLM: gptq_marlin_repack and marlin_permute_scales). The conversion to bfloat16 is exact,
because the scales of MXFP4 numbers are powers of two.

Marlin sums the even and the odd groups of 32 columns separately, and adds both sums at the end
(`Tile.parts`). Each program computes complete tiles of the result, but the last tiles are divided
among all programs (vllm-project/vllm#24722, "two-tile stream-K"). A divided tile has several sums,
each over a range of columns, which are added from the last range to the first. `last_tiles_`
computes the divided tiles again.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from poc_core.fused.experts import Opening, Rows
from poc_core.fused.quantise import rounded_silu

# Columns that share a scale.
GROUP = 32
# Marlin's tile: summed columns, and rows.
_DEEP, _WIDE = 16, 64
# Tiles of a program, along the summed columns, and the program's warps.
_TILES, _WARPS = 8, 4
# Rows of a tile of Marlin's products if there are many rows, and columns that it sums in a step.
ROWS, STEP = tl.constexpr(64), tl.constexpr(64)
# Columns of a program of `last_tiles_`.
_LAST_COLUMNS = 64


class Division(NamedTuple):
    """Marlin's division of a product: columns of a tile, and programs on one multiprocessor."""

    columns: int
    programs: int


@triton.jit
def _unpack_kernel(
    out, words, scales, n_rows, depth,
    PAIRS: tl.constexpr, TILES: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    wide, deep = tl.program_id(0), tl.program_id(1) * TILES
    expert = tl.program_id(2).to(tl.int64)
    # A tile's words: eight rows, four places of columns, four blocks of 16 rows.
    tile = deep + tl.arange(0, TILES)
    word = tl.arange(0, 2 * WIDE)
    at = words + expert * (depth // 8) * n_rows
    found = tl.load(at + tile[:, None] * (2 * n_rows) + (wide * 2 * WIDE + word)[None, :])
    # The three bits of a number's place in its word: odd column, upper half of the rows, upper half
    # of the columns.
    number = (found[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    number = tl.reshape(number, (TILES, 8, 4, 4, 2, 2, 2))
    number = tl.permute(number, (3, 5, 1, 0, 6, 2, 4))
    number = tl.reshape(number, (WIDE, TILES * DEEP))
    row = tl.arange(0, WIDE)
    eighth = row // 8
    place = row % 8 * 8 + eighth // 4 * 4 + eighth % 2 * 2 + eighth % 4 // 2
    group = deep * DEEP // GROUP + tl.arange(0, TILES * DEEP // GROUP)
    at = scales + expert * (depth // GROUP) * n_rows + wide * WIDE
    scale = tl.load(at + place[:, None] + group[None, :] * n_rows).to(tl.int32)
    scale = (scale << 23).to(tl.float32, bitcast=True)
    # Sign, two bits of the exponent, one of the mantissa.
    size = number & 7
    large = ((((size >> 1) + 126) << 23) | ((size & 1) << 22)).to(tl.float32, bitcast=True)
    value = tl.where(size > 1, large, size.to(tl.float32) * 0.5)
    value = (value.to(tl.int32, bitcast=True) | ((number & 8) << 28)).to(tl.float32, bitcast=True)
    value = tl.reshape(value, (WIDE, TILES * DEEP // GROUP, GROUP)) * scale[:, :, None]
    value = tl.reshape(value, (WIDE, TILES * DEEP))
    column = deep * DEEP + tl.arange(0, TILES * DEEP)
    row += wide * WIDE
    if PAIRS:
        row = row % (n_rows // 2) * 2 + row // (n_rows // 2)
    at = out + expert * n_rows * depth + row[:, None] * depth
    tl.store(at + column[None, :], value.to(out.dtype.element_ty))


def unpack_(out: Tensor, words: Tensor, scales: Tensor, pairs: bool = False) -> None:
    """Converts MXFP4 weights in Marlin's layout to 16-bit numbers, and writes them to out (experts,
    rows, depth).

    `words`: int32 (experts, depth / 16, 2 * rows), the weights. `scales`: float8_e8m0fnu (experts,
    depth / 32, rows). `pairs`: True to interleave both halves of the rows: row i of the first half
    is written to row 2 i, and row i of the second half to row 2 i + 1. See `can_unpack`.
    """
    n_experts, n_rows, depth = out.shape
    _unpack_kernel[(n_rows // _WIDE, depth // (_TILES * _DEEP), n_experts)](
        out, words, scales.view(torch.uint8), n_rows, depth,
        PAIRS=pairs, TILES=_TILES, DEEP=_DEEP, WIDE=_WIDE, GROUP=GROUP, num_warps=_WARPS,
    )  # fmt: skip


def can_unpack(words: Tensor, scales: Tensor) -> bool:
    """Returns True if `unpack_` supports these tensors: contiguous, and with complete tiles of
    Marlin's layout.
    """
    n_experts, deep, n_words = words.shape
    return (
        words.element_size() == 4
        and scales.element_size() == 1
        and n_words % (2 * _WIDE) == 0
        and deep % _TILES == 0
        and scales.shape == (n_experts, deep * _DEEP // GROUP, n_words // 2)
        and words.is_contiguous()
        and scales.is_contiguous()
    )


@triton.jit
def _sum(x_at, weight_at, tile, longest, n_steps, COLUMNS: tl.constexpr):
    """Returns the sums of a tile, in float32. `tile`: the index among the divided tiles; negative
    for an undivided tile. `longest`: the most steps that one program computes.
    """
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tile * n_steps
    end = begin + n_steps
    while end > begin:
        first = begin
        if tile >= 0:
            first = tl.maximum(begin, (end - 1) // longest * longest)
        even = tl.zeros((ROWS, COLUMNS), tl.float32)
        odd = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range((first - begin) * STEP, (end - begin) * STEP, STEP):
            even = tl.dot(tl.load(x_at + at), tl.load(weight_at + at), even)
            at += STEP // 2
            odd = tl.dot(tl.load(x_at + at), tl.load(weight_at + at), odd)
        found = (even + odd) + found
        end = first
    return found


@triton.jit
def _last_kernel(
    out, x, weights, share, ids, experts, n_ids, place, n_columns, depth, n_rows,
    A_TOKEN: tl.constexpr, OPENS: tl.constexpr, LIMIT: tl.constexpr,
    WIDE: tl.constexpr, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n_wide = n_columns // WIDE
    n_blocks = tl.load(n_ids) // ROWS
    n_tiles = n_blocks * n_wide
    n_divided = n_tiles
    if n_tiles > PROGRAMS:
        n_divided = n_tiles % PROGRAMS
        if n_divided * 3 <= PROGRAMS:
            n_divided += PROGRAMS
    n_steps = depth // STEP
    longest = tl.cdiv(n_steps * n_divided, PROGRAMS)
    block = n_blocks - 1 - tl.program_id(0)
    tile = block * n_wide - (n_tiles - n_divided)  # of the block's first columns
    if block < 0:
        return
    if tile + n_wide <= 0:
        return
    row = tl.load(ids + block * ROWS + tl.arange(0, ROWS))
    inside = (row < n_rows)[:, None]
    row = tl.minimum(row, n_rows - 1)
    by_expert = tl.load(place + row)
    read = row // A_TOKEN if OPENS else by_expert
    step = tl.arange(0, STEP // 2)
    x_at = x + read.to(tl.int64)[:, None] * depth + step[None, :]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    expert = weights + tl.load(experts + block).to(tl.int64) * n_columns * depth
    tile += tl.program_id(1) * COLUMNS // WIDE
    if OPENS:
        weight_at = expert + (2 * column * depth)[None, :] + step[:, None]
        gate = _sum(x_at, weight_at, tile, longest, n_steps, COLUMNS)
        tile += n_wide // 2
        up = _sum(x_at, weight_at + depth, tile, longest, n_steps, COLUMNS)
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        if LIMIT > 0:
            gate = tl.minimum(gate, LIMIT)
            up = tl.clamp(up, -LIMIT, LIMIT)
        found = rounded_silu(gate, up, out.dtype.element_ty)
        at = out + by_expert.to(tl.int64)[:, None] * (n_columns // 2)
    else:
        weight_at = expert + (column * depth)[None, :] + step[:, None]
        found = _sum(x_at, weight_at, tile, longest, n_steps, COLUMNS)
        found = found.to(out.dtype.element_ty).to(tl.float32)
        found *= tl.load(share + row)[:, None].to(tl.float32)
        at = out + row.to(tl.int64)[:, None] * n_columns
    tl.store(at + column[None, :], found.to(out.dtype.element_ty), inside)


def last_tiles_(
    out: Tensor, x: Tensor, weights: Tensor, share: Tensor, rows: Rows, place: Tensor,
    division: Division, opening: Opening | None = None,
) -> None:  # fmt: skip
    """Computes again the tiles that Marlin divides among its programs, and writes them to `out`.

    `out`, `x`, `weights`, `share`, `opening`: see `open_by_expert_`; if `opening` is None, see
    `product_by_expert_`. `rows`: in blocks of ROWS; the rows of an expert are in ascending order.
    `place`: int32 (rows,), the index of each row in expert order.
    """
    n_columns, depth = weights.shape[1:]
    gpu = torch.cuda.get_device_properties(out.device)
    programs = gpu.multi_processor_count * division.programs
    most = (programs + programs // 3) // (n_columns // division.columns) + 2
    a_token, limit = opening or (1, 0.0)
    wide = n_columns // 2 if opening else n_columns
    _last_kernel[(most, wide // _LAST_COLUMNS)](
        out, x, weights, share, *rows, place, n_columns, depth, len(place),
        A_TOKEN=a_token, OPENS=opening is not None, LIMIT=limit, WIDE=division.columns,
        PROGRAMS=programs, COLUMNS=_LAST_COLUMNS, num_warps=4, num_stages=4, enable_fp_fusion=False,
    )  # fmt: skip


def places(rows: Rows, n: int) -> Tensor:
    """Returns the index in `rows.ids` of each of `n` rows: int32 (n,)."""
    place = torch.arange(len(rows.ids), dtype=torch.int32, device=rows.ids.device)
    found = torch.empty(n + 1, dtype=torch.int32, device=rows.ids.device)
    found[torch.where(place < rows.n, rows.ids, n).long()] = place  # n: rows of no token
    return found[:n]
