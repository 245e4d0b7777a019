"""vLLM's Marlin layout of experts' 4-bit weights, and Marlin's order of sums.

Marlin stores weights in tiles of 64 rows and 16 columns, where products are summed along the
columns. A tile has 128 words of eight 4-bit numbers. The scales of 64 rows have another order than
the rows (vLLM: gptq_marlin_repack and marlin_permute_scales). The conversion to bfloat16 is exact,
because the scales of MXFP4 numbers are powers of two.

Marlin sums the even and the odd groups of 32 columns separately, and adds both sums at the end.
Each program computes complete tiles of the result, but the last tiles are divided among all
programs (vllm-project/vllm#24722, "two-tile stream-K"). A divided tile has several sums, each over
a range of columns, which are added from the last range to the first. `marlin_products` computes
complete tiles, and `last_tiles_` computes the divided tiles again.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.vllm.kernels.experts import Rows
from workers.vllm.kernels.quantise import rounded_silu

# Columns that share a scale.
GROUP = 32
# Rows of a tile of Marlin's products if there are many rows, and columns that it sums in a step.
ROWS, STEP = tl.constexpr(64), tl.constexpr(64)
# Columns of a program of `last_tiles_`: rows of a tile of weights.
_WIDE = tl.constexpr(64)
# Columns of a block of the result, and summed columns of a pair of steps, in `marlin_products`.
COLUMNS, DEPTH = 256, 128


class Division(NamedTuple):
    """Marlin's division of a product: columns of a tile, and programs on one multiprocessor."""

    columns: int
    programs: int


class Opening(NamedTuple):
    """The options of the activation silu(gate) * up after the first product."""

    a_token: int  # the number of experts per row of `x`
    # Gates are clamped to at most `limit`, and `up` to -limit .. limit; 0: no clamping.
    limit: float


def can_multiply(words: Tensor, scales: Tensor) -> bool:
    """Returns True if the kernels support these MXFP4 weights in Marlin's layout.

    `words`: int32 (experts, depth / 16, 2 * rows), the weights. `scales`: float8_e8m0fnu (experts,
    depth / 32, rows).
    """
    n_experts, deep, n_words = words.shape
    return (
        words.element_size() == 4
        and scales.element_size() == 1
        and n_words % (2 * COLUMNS) == 0
        and deep * 16 % DEPTH == 0
        and scales.shape == (n_experts, deep * 16 // GROUP, n_words // 2)
        and words.is_contiguous()
        and scales.is_contiguous()
    )


@triton.jit
def _unpacked(words, scales, dtype: tl.constexpr):
    """Returns the weights of two tiles and a group of scales, as (32 columns, 64 rows)."""
    # The words of a tile: eight rows, four places of columns, four blocks of 16 rows. The three
    # bits of a number's place in its word: odd column, upper half of the rows, upper half of the
    # columns.
    number = (tl.load(words)[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    number = tl.reshape(number, (2, 8, 4, 4, 2, 2, 2))
    number = tl.reshape(tl.permute(number, (0, 6, 2, 4, 3, 5, 1)), (32, 64))
    # Sign, two bits of the exponent, one of the mantissa.
    size = number & 7
    large = ((((size >> 1) + 126) << 23) | ((size & 1) << 22)).to(tl.float32, bitcast=True)
    value = tl.where(size > 1, large, size.to(tl.float32) * 0.5)
    value = (value.to(tl.int32, bitcast=True) | ((number & 8) << 28)).to(tl.float32, bitcast=True)
    scale = (tl.load(scales).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return (value * scale[None, :]).to(dtype)


@triton.jit
def _sum(x_at, words, scales, n_columns, tile, longest, n_steps):
    """Returns the sums of a tile, in float32. `tile`: the index among the divided tiles; negative
    for an undivided tile. `longest`: the most steps that one program computes.
    """
    found = tl.zeros((ROWS, _WIDE), tl.float32)
    begin = tile * n_steps
    end = begin + n_steps
    while end > begin:
        first = begin
        if tile >= 0:
            first = tl.maximum(begin, (end - 1) // longest * longest)
        even = tl.zeros((ROWS, _WIDE), tl.float32)
        odd = tl.zeros((ROWS, _WIDE), tl.float32)
        for at in range(first - begin, end - begin):
            words_at, scales_at = words + at * (8 * n_columns), scales + at * (2 * n_columns)
            x = tl.load(x_at + at * STEP)
            even = tl.dot(x, _unpacked(words_at, scales_at, x.dtype), even)
            x = tl.load(x_at + at * STEP + STEP // 2)
            words_at, scales_at = words_at + 4 * n_columns, scales_at + n_columns
            odd = tl.dot(x, _unpacked(words_at, scales_at, x.dtype), odd)
        found = (even + odd) + found
        end = first
    return found


@triton.jit
def _last_kernel(
    out, x, words, scales, share, ids, experts, n_ids, place, n_columns, depth, n_rows,
    A_TOKEN: tl.constexpr, OPENS: tl.constexpr, LIMIT: tl.constexpr,
    WIDE: tl.constexpr, PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
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
    first = tl.program_id(1) * _WIDE
    column = first + tl.arange(0, _WIDE)
    expert = tl.load(experts + block).to(tl.int64)
    word = tl.arange(0, 2)[:, None] * (2 * n_columns) + tl.arange(0, 2 * _WIDE)[None, :]
    words += expert * (depth // 16) * (2 * n_columns) + 2 * first + word
    eighth = tl.arange(0, _WIDE) // 8
    order = tl.arange(0, _WIDE) % 8 * 8 + eighth // 4 * 4 + eighth % 2 * 2 + eighth % 4 // 2
    scales += expert * (depth // GROUP) * n_columns + first + order
    tile += first // WIDE
    if OPENS:
        gate = _sum(x_at, words, scales, n_columns, tile, longest, n_steps)
        tile += n_wide // 2
        words += n_columns
        scales += n_columns // 2
        up = _sum(x_at, words, scales, n_columns, tile, longest, n_steps)
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        if LIMIT > 0:
            gate = tl.minimum(gate, LIMIT)
            up = tl.clamp(up, -LIMIT, LIMIT)
        found = rounded_silu(gate, up, out.dtype.element_ty)
        at = out + by_expert.to(tl.int64)[:, None] * (n_columns // 2)
    else:
        found = _sum(x_at, words, scales, n_columns, tile, longest, n_steps)
        found = found.to(out.dtype.element_ty).to(tl.float32)
        found *= tl.load(share + row)[:, None].to(tl.float32)
        at = out + row.to(tl.int64)[:, None] * n_columns
    tl.store(at + column[None, :], found.to(out.dtype.element_ty), inside)


def last_tiles_(
    out: Tensor, x: Tensor, words: Tensor, scales: Tensor, share: Tensor, rows: Rows, place: Tensor,
    division: Division, opening: Opening | None = None,
) -> None:  # fmt: skip
    """Computes again the tiles that Marlin divides among its programs, and writes them to `out`.

    `out`, `x`, `words`, `scales`, `share`, `opening`: see `marlin_products.multiply_`. `rows`: in
    blocks of ROWS; the rows of an expert are in ascending order. `place`: int32 (rows,), the index
    of each row in the expert order of `out` or `x`.
    """
    n_columns, depth = words.shape[2] // 2, words.shape[1] * 16
    gpu = torch.cuda.get_device_properties(out.device)
    programs = gpu.multi_processor_count * division.programs
    most = (programs + programs // 3) // (n_columns // division.columns) + 2
    a_token, limit = opening or (1, 0.0)
    wide = n_columns // 2 if opening else n_columns
    _last_kernel[(most, wide // _WIDE.value)](
        out, x, words, scales.view(torch.uint8), share, *rows, place, n_columns, depth, len(place),
        A_TOKEN=a_token, OPENS=opening is not None, LIMIT=limit, WIDE=division.columns,
        PROGRAMS=programs, GROUP=GROUP, num_warps=4, num_stages=4, enable_fp_fusion=False,
    )  # fmt: skip


def places(rows: Rows, n: int) -> Tensor:
    """Returns the index in `rows.ids` of each of `n` rows: int32 (n,)."""
    place = torch.arange(len(rows.ids), dtype=torch.int32, device=rows.ids.device)
    found = torch.empty(n + 1, dtype=torch.int32, device=rows.ids.device)
    found[torch.where(place < rows.n, rows.ids, n).long()] = place  # n: rows of no token
    return found[:n]
