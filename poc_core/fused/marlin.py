"""Converts experts' 4-bit weights from vLLM's Marlin layout to plain 16-bit matrices.

Marlin stores weights in tiles of 64 rows and 16 columns, where products are summed along the
columns. A tile has 128 words of eight 4-bit numbers. The scales of 64 rows have another order than
the rows (vLLM: gptq_marlin_repack and marlin_permute_scales). The conversion to bfloat16 is exact,
because the scales of MXFP4 numbers are powers of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns that share a scale.
GROUP = 32
# Marlin's tile: summed columns, and rows.
_DEEP, _WIDE = 16, 64
# Tiles of a program, along the summed columns, and the program's warps.
_TILES, _WARPS = 8, 4


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
