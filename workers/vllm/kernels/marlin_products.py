"""Matrix products of mixture-of-experts layers with 4-bit weights in Marlin's layout, on Hopper.

A program computes blocks of the result with 128 rows and 256 columns. One group of warps copies
rows and weights to shared memory. Each of the four other groups computes 64 columns: it unpacks the
weights in registers and multiplies them by the rows with the tensor cores. So an expert's weights
are unpacked once for 128 rows; Marlin's kernel unpacks them once for 64 rows.

Even and odd groups of 32 columns are summed one after the other, as `workers.vllm.kernels.marlin`
explains. The sums of the even groups wait in shared memory.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from workers.vllm.kernels.experts import Rows, block_at
from workers.vllm.kernels.gluon_copies import copy, signal_step_before
from workers.vllm.kernels.marlin import COLUMNS, DEPTH, GROUP, Opening
from workers.vllm.kernels.quantise import rounded_silu

ROWS = 128  # of a block of the result
_ROWS, _COLUMNS, _GROUP = gl.constexpr(ROWS), gl.constexpr(COLUMNS), gl.constexpr(GROUP)
_DEPTH = gl.constexpr(DEPTH)
# Steps in shared memory, and blocks of rows that share weights.
_STAGES, _NEAR = gl.constexpr(3), gl.constexpr(4)
# Registers of a thread that multiplies, and of a thread that copies.
_MULTIPLIES, _COPIES = gl.constexpr(104), gl.constexpr(40)

# Triton 3.9 changed a name.
_IS_OLD = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


def _bits_of_numbers() -> str:
    """Returns the instructions that unpack a word: eight numbers of 4 bits (sign, two bits of the
    exponent, one bit of the mantissa) become $0 to $7 in bfloat16, two in each register. $8: the
    word. $9 and $10: the scales of its lower and upper rows, each twice in a register.

    The bits of a number, moved to their places in a bfloat16, are the number times 2 ** -126.
    """
    lines = ["mov.b32 power, 0x7e807e80;"]
    for pair in range(4):
        move = f"shl.b32 t, $8, {6 - 4 * pair}" if pair < 2 else f"shr.b32 t, $8, {4 * pair - 6}"
        lines += [
            f"{move};",
            "and.b32 t, t, 0x01c001c0;",
            f"shl.b32 sign, $8, {12 - 4 * pair};",
            "and.b32 sign, sign, 0x80008000;",
            "or.b32 t, t, sign;",
            "mul.rn.bf16x2 t, t, power;",
            f"mul.rn.bf16x2 t, t, ${9 + pair // 2};",
            f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, t;",
        ]
    return "\n".join(["{.reg .b32 t, sign, power;", *lines, "}"])


_UNPACK = gl.constexpr(_bits_of_numbers())
_UNPACKED = gl.constexpr((gl.int16,) * 8)
_OPERANDS = gl.constexpr(",".join(["=h"] * 8 + ["r"] * 3))


# Layouts of tensors in the registers of a group of warps. The words of a step have six indices:
# tile of 16 summed columns; half of the block; tile of 64 columns; thread; which two blocks of 16
# columns; which of these two. A group has two blocks of both halves.
_LANES = [1 << i for i in range(5)]
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0, 0, 0, 0, 0]],
        [[0, 0, 0, lane, 0, 0] for lane in _LANES],
        [[0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0]],
        [],
        [2, 2, 1, 32, 1, 2],
    )
)
_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [],
        [[0, 0, lane, 0, 0] for lane in _LANES],
        [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]],
        [],
        [2, 1, 32, 1, 2],
    )
)
# A thread has eight neighbouring columns of both halves, because a gate and its `up` are in
# different halves.
_RESULT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [32, 0], [64, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [ROWS, 64],
    )
)


@gluon.jit
def _load(
    x, words, scales, ids, experts, n_ids, memory, sizes,
    A_TOKEN: gl.constexpr, OPENS: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    rows, packed, powers, full, free = memory
    n_columns, depth, n_rows = sizes
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    of_words: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    of_scales: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    n_high = gl.load(n_ids) // _ROWS
    n_wide = n_columns // _COLUMNS
    # A block has 128 columns for gates and the same columns for `up`, or else 256 neighbours. A
    # tile of 64 columns has 128 words, and 64 scales: a word of four scales belongs to four words.
    apart = n_columns // 2 if OPENS else _COLUMNS // 2
    word = gl.arange(0, 2 * _COLUMNS, gl.SliceLayout(0, of_words))
    word = word // _COLUMNS * (2 * apart) + word % _COLUMNS
    tile = gl.arange(0, 2, gl.SliceLayout(1, of_words))
    word_at = tile[:, None] * (2 * n_columns) + word[None, :]
    word = gl.arange(0, 2 * _COLUMNS, of_scales)
    scale_at = word // _COLUMNS * (apart // 4) + word // 128 % 2 * 16
    scale_at += word // 16 % 8 * 2 + word // 2 % 2
    step = 0
    for number in range(gl.program_id(0), n_high * n_wide, PROGRAMS):
        row_block, column_block = block_at(number, n_high, n_wide, _NEAR)
        expert = gl.load(experts + row_block).to(gl.int64)
        row = row_block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, of_rows))
        column = column_block * _COLUMNS
        if OPENS:
            row = gl.minimum(gl.load(ids + row), n_rows - 1) // A_TOKEN
            column = column_block * (_COLUMNS // 2)
        x_at = x + row.to(gl.int64)[:, None] * depth
        x_at += gl.arange(0, _GROUP, gl.SliceLayout(0, of_rows))[None, :]
        own_words = words + expert * (depth // 16) * (2 * n_columns) + 2 * column
        own_scales = scales + expert * (depth // _GROUP) * (n_columns // 4) + column // 4
        for part in gl.static_range(2):
            for at in range(part * _GROUP, depth, _DEPTH):
                stage = step % _STAGES
                mbarrier.wait(free.index(stage), (step // _STAGES & 1) ^ 1)
                for half in gl.static_range(2):
                    to = stage * 2 + half
                    deep = at + half * 2 * _GROUP
                    copy(rows.index(to), x_at + deep)
                    copy(packed.index(to), own_words + deep // 16 * (2 * n_columns) + word_at)
                    copy(
                        powers.index(to), own_scales + deep // _GROUP * (n_columns // 4) + scale_at
                    )
                async_copy.commit_group()
                signal_step_before(full, step, 1)
                step += 1
    signal_step_before(full, step, 0)


@gluon.jit
def _unpacked(packed, powers, OWN: gl.constexpr, MMA: gl.constexpr):
    """Returns a step's weights in bfloat16: 64 columns of the result x 32 summed columns."""
    words = packed.reshape([2, 2, 2, 32, 2, 2]).slice(OWN // 2, 1, 2).slice(OWN % 2, 1, 4)
    scales = powers.reshape([2, 2, 32, 2, 2]).slice(OWN // 2, 1, 1).slice(OWN % 2, 1, 3)
    words = gl.reshape(words.load(_WORDS), (2, 64, 2))
    by_word: gl.constexpr = gl.SliceLayout(0, words.type.layout)
    scales = gl.reshape(scales.load(_SCALES), (64, 2))
    scales = gl.convert_layout(scales, by_word, assert_trivial=True)
    scales = scales >> (gl.arange(0, 2, gl.SliceLayout(0, by_word))[None, :] * 8)
    # Two equal powers of two in bfloat16: the exponent's bits.
    lower, _ = gl.broadcast((((scales & 255) << 7) * 65537)[None, :, :], words)
    upper, _ = gl.broadcast((((scales >> 16 & 255) << 7) * 65537)[None, :, :], words)
    n = gl.inline_asm_elementwise(
        _UNPACK, _OPERANDS, [words, lower, upper], _UNPACKED, is_pure=True, pack=1
    )
    lower = gl.join(gl.join(n[0], n[1]), gl.join(n[2], n[3]))
    upper = gl.join(gl.join(n[4], n[5]), gl.join(n[6], n[7]))
    # Axes: tile, half, row, place of columns, block; odd column, upper columns, upper rows.
    found = gl.reshape(gl.join(lower, upper), (2, 2, 8, 4, 2, 2, 2, 2))
    found = gl.permute(found, (1, 4, 7, 2, 0, 6, 3, 5))
    found = gl.reshape(found, (64, 32)).to(gl.bfloat16, bitcast=True)
    return gl.convert_layout(found, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _as_result(sums):
    """Returns the memory of `sums` (64, rows) for numbers in bfloat16 (rows, 64)."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if _IS_OLD:
        return sums._reinterpret(gl.bfloat16, [2, _ROWS, 64], layout).index(0)  # noqa: SLF001
    else:
        return sums.reinterpret(gl.bfloat16, [2, _ROWS, 64], layout).index(0)


@gluon.jit
def _multiply(
    given, memory, sizes,
    OWN: gl.constexpr, OPENS: gl.constexpr, LIMIT: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Computes 64 columns of each block. `OWN`: the index of this group of warps."""
    out, share, ids, n_ids, all_sums, out_stride = given
    rows, packed, powers, full, free = memory
    n_columns, depth, n_rows = sizes
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 16])
    n_high = gl.load(n_ids) // _ROWS
    n_wide = n_columns // _COLUMNS
    n_steps = depth // _DEPTH
    first = gl.program_id(0)
    n_blocks = gl.cdiv(gl.maximum(n_high * n_wide - first, 0), PROGRAMS)
    sums = all_sums.index(OWN)
    result = _as_result(sums)
    step = 0
    # Sums of two iterations do not fit in registers: those of even iterations wait in `sums`.
    for i in range(2 * n_blocks):
        found = gl.zeros([64, _ROWS], gl.float32, mma)
        for _ in range(n_steps):
            stage = step % _STAGES
            mbarrier.wait(full.index(stage), step // _STAGES & 1)
            for half in gl.static_range(2):
                at = stage * 2 + half
                weights = _unpacked(packed.index(at), powers.index(at), OWN, mma)
                right = rows.index(at).permute((1, 0))
                found = warpgroup_mma(weights, right, found, is_async=True)
            found = warpgroup_mma_wait(0, deps=(found,))
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
        if i % 2 == 0:
            sums.store(found)
        else:
            found = sums.load(mma) + found
            result.permute((1, 0)).store(found.to(gl.bfloat16))
            value = result.load(_RESULT).to(gl.float32)
            row_block, column_block = block_at(first + i // 2 * PROGRAMS, n_high, n_wide, _NEAR)
            if OPENS:
                halves = gl.permute(gl.reshape(value, (_ROWS, 2, 32)), (0, 2, 1))
                gate, up = gl.split(halves)
                if LIMIT > 0:
                    gate = gl.minimum(gate, LIMIT)
                    up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
                opened = rounded_silu(gate, up, gl.bfloat16).to(gl.bfloat16)
                own: gl.constexpr = gate.type.layout
                row = row_block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, own))
                column = gl.arange(0, 32, gl.SliceLayout(0, own))
                column += column_block * (_COLUMNS // 2) + OWN * 32
                at = out + row.to(gl.int64)[:, None] * out_stride + column[None, :]
                gl.store(at, opened)
            else:
                row = row_block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, _RESULT))
                row = gl.load(ids + row)
                inside = (row < n_rows)[:, None]
                row = gl.minimum(row, n_rows - 1)
                column = gl.arange(0, 64, gl.SliceLayout(0, _RESULT))
                column = column // 32 * (_COLUMNS // 2) + column % 32
                column += column_block * _COLUMNS + OWN * 32
                value *= gl.load(share + row).to(gl.float32)[:, None]
                at = out + row.to(gl.int64)[:, None] * out_stride + column[None, :]
                gl.store(at, value.to(gl.bfloat16), inside)


@gluon.jit(do_not_specialize=["n_rows"])  # n_rows varies; each specialisation is compiled
def _product_kernel(
    x, words, scales, out, share, ids, experts, n_ids, n_columns, depth, n_rows, out_stride,
    A_TOKEN: gl.constexpr, OPENS: gl.constexpr, LIMIT: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    n: gl.constexpr = 2 * _STAGES
    of_words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    of_scales: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_sums: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    of_rows: gl.constexpr = gl.NVMMASharedLayout(2 * _GROUP, 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    rows = gl.allocate_shared_memory(gl.bfloat16, [n, _ROWS, _GROUP], of_rows)
    packed = gl.allocate_shared_memory(gl.int32, [n, 2, 2 * _COLUMNS], of_words)
    powers = gl.allocate_shared_memory(gl.int32, [n, 2 * _COLUMNS], of_scales)
    sums = gl.allocate_shared_memory(gl.float32, [4, 64, _ROWS], of_sums)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=4)
    fence_async_shared()
    memory = (rows, packed, powers, full, free)
    sizes = (n_columns, depth, n_rows)
    given = (out, share, ids, n_ids, sums, out_stride)
    gl.warp_specialize(
        [
            (_multiply, (given, memory, sizes, 0, OPENS, LIMIT, PROGRAMS)),
            (_multiply, (given, memory, sizes, 1, OPENS, LIMIT, PROGRAMS)),
            (_multiply, (given, memory, sizes, 2, OPENS, LIMIT, PROGRAMS)),
            (_multiply, (given, memory, sizes, 3, OPENS, LIMIT, PROGRAMS)),
            (
                _load,
                (x, words, scales, ids, experts, n_ids, memory, sizes, A_TOKEN, OPENS, PROGRAMS),
            ),
        ],
        [4, 4, 4, 4],
        [_MULTIPLIES, _MULTIPLIES, _MULTIPLIES, _COPIES],
    )


def multiply_(
    out: Tensor, x: Tensor, words: Tensor, scales: Tensor, share: Tensor, rows: Rows,
    opening: Opening | None = None,
) -> None:  # fmt: skip
    """Multiplies rows by the weights of their experts in bfloat16, and writes the products to
    `out`. `words` and `scales` (experts, ...): see `workers.vllm.kernels.marlin.can_multiply`.

    With `opening`, computes the first product of an MoE layer and its activation silu(gate) * up.
    `x`: (n, k). `out`: (rows_by_expert(rows, ROWS), m), in the order of `rows.ids`. The first m
    columns of the weights are for gates, the other m for `up`.

    Without `opening`, computes the second product. `x`: (rows_by_expert(rows, ROWS), k), in the
    order of `rows.ids`. `out`: (n, m). `share`: (n,), the router's weight for each row of `out`.
    """
    n_columns, depth = words.shape[2] // 2, words.shape[1] * 16
    a_token, limit = opening or (1, 0.0)
    programs = torch.cuda.get_device_properties(out.device).multi_processor_count
    _product_kernel[(programs,)](
        x, words, scales.view(torch.int32), out, share, *rows, n_columns, depth,
        len(x) * a_token if opening else len(out), out.stride(0),
        A_TOKEN=a_token, OPENS=opening is not None, LIMIT=limit, PROGRAMS=programs,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
