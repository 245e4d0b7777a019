"""The first product of a mixture-of-experts layer in 8-bit floats, and its activation, on Hopper.

The sums and the results are those of `block_experts.open_gates_` with scales that are powers of
two. A program computes blocks of 128 rows and 128 gates with their `up`. One group of warps copies
rows and weights to shared memory. Two other groups compute 64 rows each: while one of them adds its
products to its sums, the tensor cores multiply for the other.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from workers.vllm.kernels.block_experts import Quantised
from workers.vllm.kernels.experts import Rows, block_at
from workers.vllm.kernels.gluon_copies import boxes_of, copy, copy_box, signal_step_before
from workers.vllm.kernels.quantise import GROUP, quantised, rounded_silu

# Rows and columns of a block, and columns that are summed in a step.
_SIZE = gl.constexpr(GROUP)
# Steps in shared memory, and blocks of rows that share weights.
_STAGES, _NEAR = gl.constexpr(4), gl.constexpr(8)
# Registers of a thread that multiplies, and of a thread that copies.
_MULTIPLIES, _COPIES = gl.constexpr(232), gl.constexpr(40)


@gluon.jit
def _load(
    x, x_scales, weights, ids, experts, n_ids, memory, sizes, x_scale_row, x_scale_column,
    A_TOKEN: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    rows, gates, ups, by_row, full, free = memory
    n_columns, depth, n_rows = sizes
    of_rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    of_scales: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    n_high = gl.load(n_ids) // _SIZE
    n_wide = n_columns // (2 * _SIZE)
    step = 0
    for number in range(gl.program_id(0), n_high * n_wide, PROGRAMS):
        row_block, column_block = block_at(number, n_high, n_wide, _NEAR)
        column = gl.load(experts + row_block) * n_columns + column_block * _SIZE
        row = gl.load(ids + row_block * _SIZE + gl.arange(0, _SIZE, gl.SliceLayout(1, of_rows)))
        row = gl.minimum(row, n_rows - 1) // A_TOKEN
        x_at = x + row.to(gl.int64)[:, None] * depth
        x_at += gl.arange(0, _SIZE, gl.SliceLayout(0, of_rows))[None, :]
        row = gl.load(ids + row_block * _SIZE + gl.arange(0, _SIZE, of_scales))
        scale_at = x_scales + gl.minimum(row, n_rows - 1) // A_TOKEN * x_scale_row
        for at in range(depth // _SIZE):
            stage = step % _STAGES
            mbarrier.wait(free.index(stage), (step // _STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 2 * _SIZE * _SIZE)
            copy_box(weights, [column, at * _SIZE], bar, gates.index(stage))
            copy_box(weights, [column + n_columns // 2, at * _SIZE], bar, ups.index(stage))
            copy(rows.index(stage), x_at + at * _SIZE)
            copy(by_row.index(stage), scale_at + at * x_scale_column)
            async_copy.commit_group()
            signal_step_before(full, step, 1)
            step += 1
    signal_step_before(full, step, 0)


@gluon.jit
def _scaled_sum(found, sums, part, weights, by_row, by_column, MMA: gl.constexpr):
    """Returns found + (part @ weights.T) * by_row * by_column, and the memory of the product."""
    sums = warpgroup_mma(part, weights.permute((1, 0)), sums, use_acc=False, is_async=True)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    by_column = gl.full([_SIZE // 2, _SIZE], by_column, gl.float32, MMA)
    return gl.fma(sums * by_row[:, None], by_column, found), sums


@gluon.jit
def _multiply(
    given, memory, sizes, strides,
    OWN: gl.constexpr, LIMIT: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Computes half of the rows of each block. `OWN`: the index of this group of warps."""
    out, out_scales, scales, experts, n_ids = given
    rows, gates, ups, by_row, full, free = memory
    n_columns, depth, _ = sizes
    scale_expert, scale_row, scale_column, out_stride, out_scale_row, out_scale_column = strides
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIZE, 32])
    lines: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    n_high = gl.load(n_ids) // _SIZE
    n_wide = n_columns // (2 * _SIZE)
    step = 0
    for number in range(gl.program_id(0), n_high * n_wide, PROGRAMS):
        row_block, column_block = block_at(number, n_high, n_wide, _NEAR)
        scale_at = scales + gl.load(experts + row_block) * scale_expert + column_block * scale_row
        gate = gl.zeros([_SIZE // 2, _SIZE], gl.float32, mma)
        up = gl.zeros([_SIZE // 2, _SIZE], gl.float32, mma)
        sums = gl.zeros([_SIZE // 2, _SIZE], gl.float32, mma)
        for at in range(depth // _SIZE):
            stage = step % _STAGES
            of_gate = gl.load(scale_at + at * scale_column)
            of_up = gl.load(scale_at + n_wide * scale_row + at * scale_column)
            mbarrier.wait(full.index(stage), step // _STAGES & 1)
            part = rows.index(stage).slice(OWN * (_SIZE // 2), _SIZE // 2, 0)
            scale = by_row.index(stage).slice(OWN * (_SIZE // 2), _SIZE // 2, 0)
            scale = scale.load(gl.SliceLayout(1, mma))
            gate, sums = _scaled_sum(gate, sums, part, gates.index(stage), scale, of_gate, mma)
            up, sums = _scaled_sum(up, sums, part, ups.index(stage), scale, of_up, mma)
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
        gate, up = gate.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
        if LIMIT > 0:
            gate = gl.minimum(gate, LIMIT)
            up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
        opened, scale = quantised(rounded_silu(gate, up, gl.bfloat16), True)
        first = row_block * _SIZE + OWN * (_SIZE // 2)
        row = first + gl.arange(0, _SIZE // 2, gl.SliceLayout(1, mma))
        gl.store(out_scales + row * out_scale_row + column_block * out_scale_column, scale)
        row = first + gl.arange(0, _SIZE // 2, gl.SliceLayout(1, lines))
        column = column_block * _SIZE + gl.arange(0, _SIZE, gl.SliceLayout(0, lines))
        at = out + row.to(gl.int64)[:, None] * out_stride + column[None, :]
        gl.store(at, gl.convert_layout(opened.to(gl.float8e4nv), lines))


@gluon.jit(do_not_specialize=["n_rows"])  # n_rows varies; each specialisation is compiled
def _gates_kernel(
    x, x_scales, weights, scales, out, out_scales, ids, experts, n_ids, n_columns, depth, n_rows,
    x_scale_row, x_scale_column, scale_expert, scale_row, scale_column,
    out_stride, out_scale_row, out_scale_column,
    A_TOKEN: gl.constexpr, LIMIT: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    shape: gl.constexpr = [_STAGES, _SIZE, _SIZE]
    of_numbers: gl.constexpr = gl.NVMMASharedLayout(_SIZE, 8, 2)
    of_scales: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    rows = gl.allocate_shared_memory(gl.float8e4nv, shape, of_numbers)
    gates = gl.allocate_shared_memory(gl.float8e4nv, shape, of_numbers)
    ups = gl.allocate_shared_memory(gl.float8e4nv, shape, of_numbers)
    by_row = gl.allocate_shared_memory(gl.float32, [_STAGES, _SIZE], of_scales)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=2)  # weights, and rows with their scales
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    memory = (rows, gates, ups, by_row, full, free)
    sizes = (n_columns, depth, n_rows)
    given = (out, out_scales, scales, experts, n_ids)
    strides = (
        scale_expert, scale_row, scale_column, out_stride, out_scale_row, out_scale_column
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (given, memory, sizes, strides, 0, LIMIT, PROGRAMS)),
            (_multiply, (given, memory, sizes, strides, 1, LIMIT, PROGRAMS)),
            (
                _load,
                (
                    x, x_scales, weights, ids, experts, n_ids, memory, sizes,
                    x_scale_row, x_scale_column, A_TOKEN, PROGRAMS,
                ),
            ),
        ],
        [4, 4],
        [_MULTIPLIES, _COPIES],
    )  # fmt: skip


def open_gates_(
    out: Quantised, x: Quantised, weights: Quantised, rows: Rows, a_token: int, limit: float
) -> None:
    """Computes what `block_experts.open_gates_` computes with `Gates(True, limit)`. `rows`: in
    blocks of GROUP.
    """
    n_columns, depth = weights.numbers.shape[1:]
    programs = torch.cuda.get_device_properties(x.numbers.device).multi_processor_count
    _gates_kernel[(programs,)](
        x.numbers, x.scales, boxes_of(weights.numbers.view(-1, depth)), weights.scales,
        out.numbers, out.scales, *rows, n_columns, depth, len(x.numbers) * a_token,
        *x.scales.stride(), *weights.scales.stride(), out.numbers.stride(0), *out.scales.stride(),
        A_TOKEN=a_token, LIMIT=limit, PROGRAMS=programs, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
