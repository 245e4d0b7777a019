"""The second product of a mixture-of-experts layer in 8-bit floats, on Hopper.

The results are those of `block_experts.multiply_`. A program keeps 128 complete rows in shared
memory, and multiplies them by one group of 128 columns after the other. One warp copies rows and
weights to shared memory. Two groups of warps compute 64 rows each: while one of them adds its
products to its sums, the tensor cores multiply for the other.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from workers.vllm.kernels.block_experts import DOWN_STEPS, Quantised
from workers.vllm.kernels.experts import Rows
from workers.vllm.kernels.gluon_copies import boxes_of, copy_box
from workers.vllm.kernels.quantise import GROUP

# Rows and columns of a block, and columns that are summed in a step.
_SIZE = gl.constexpr(GROUP)
# Steps whose weights are in shared memory. A block has at least as many steps, so its rows
# have been read before the next block's rows overwrite them.
_STAGES = gl.constexpr(DOWN_STEPS.start)
# Programs that share the columns of a block of rows.
_PARTS = gl.constexpr(2)
# Registers of a thread that multiplies, and of a thread that copies.
_MULTIPLIES, _COPIES = gl.constexpr(232), gl.constexpr(24)


@gluon.jit
def _load(
    x, weights, experts, n_ids, memory, n_columns, STEPS: gl.constexpr, PROGRAMS: gl.constexpr
):  # fmt: skip
    rows, columns, full, free = memory
    n_units = gl.load(n_ids) // _SIZE * _PARTS
    n_wide = n_columns // (_SIZE * _PARTS)
    step = 0
    for number in range(gl.program_id(0), n_units, PROGRAMS):
        row_block, part = number // _PARTS, number % _PARTS
        column = gl.load(experts + row_block) * n_columns + part * n_wide * _SIZE
        for wide in range(n_wide):
            for at in gl.static_range(STEPS):
                stage = step % _STAGES
                mbarrier.wait(free.index(stage), (step // _STAGES & 1) ^ 1)
                bar = full.index(stage)
                if wide == 0:
                    mbarrier.expect(bar, 2 * _SIZE * _SIZE)
                    copy_box(x, [row_block * _SIZE, at * _SIZE], bar, rows.index(at))
                else:
                    mbarrier.expect(bar, _SIZE * _SIZE)
                copy_box(weights, [column + wide * _SIZE, at * _SIZE], bar, columns.index(stage))
                step += 1


@gluon.jit
def _multiply(
    given, memory, sizes, strides, OWN: gl.constexpr, STEPS: gl.constexpr, PROGRAMS: gl.constexpr
):  # fmt: skip
    """Computes half of the rows of each block. `OWN`: the index of this group of warps."""
    out, x_scales, scales, share, ids, experts, n_ids = given
    rows, columns, full, free = memory
    n_columns, n_rows = sizes
    x_scale_row, x_scale_column, scale_expert, scale_row, scale_column, out_stride = strides
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIZE, 32])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    n_units = gl.load(n_ids) // _SIZE * _PARTS
    n_wide = n_columns // (_SIZE * _PARTS)
    step = 0
    for number in range(gl.program_id(0), n_units, PROGRAMS):
        row_block, first_wide = number // _PARTS, number % _PARTS * n_wide
        scale_at = scales + gl.load(experts + row_block) * scale_expert + first_wide * scale_row
        first = row_block * _SIZE + OWN * (_SIZE // 2)
        row = first + gl.arange(0, _SIZE // 2, gl.SliceLayout(1, mma))
        by_rows = ()
        for at in gl.static_range(STEPS):
            by_row = gl.load(x_scales + row * x_scale_row + at * x_scale_column)
            by_rows = by_rows + (by_row,)  # noqa: RUF005
        by_share = gl.load(share + gl.minimum(gl.load(ids + row), n_rows - 1))
        row = gl.load(ids + first + gl.arange(0, _SIZE // 2, gl.SliceLayout(1, lines)))
        inside = (row < n_rows)[:, None]
        row = gl.minimum(row, n_rows - 1)
        column = first_wide * _SIZE + gl.arange(0, _SIZE, gl.SliceLayout(0, lines))
        out_at = out + row.to(gl.int64)[:, None] * out_stride + column[None, :]
        for wide in range(n_wide):
            found = gl.zeros([_SIZE // 2, _SIZE], gl.float32, mma)
            for at in gl.static_range(STEPS):
                by_column = gl.load(scale_at + wide * scale_row + at * scale_column)
                by_column = gl.full([_SIZE // 2, _SIZE], by_column, gl.float32, mma)
                stage = step % _STAGES
                mbarrier.wait(full.index(stage), step // _STAGES & 1)
                left = rows.index(at).slice(OWN * (_SIZE // 2), _SIZE // 2, 0)
                right = columns.index(stage).permute((1, 0))
                sums = gl.zeros([_SIZE // 2, _SIZE], gl.float32, mma)
                sums = warpgroup_mma(left, right, sums, use_acc=False, is_async=True)
                sums = warpgroup_mma_wait(0, deps=(sums,))
                mbarrier.arrive(free.index(stage), count=1)
                found = gl.fma(sums * by_rows[at][:, None], by_column, found)
                step += 1
            found = (found * by_share[:, None]).to(gl.bfloat16)
            gl.store(out_at + wide * _SIZE, gl.convert_layout(found, lines), inside)


@gluon.jit(do_not_specialize=["n_rows"])  # n_rows varies; each specialisation is compiled
def _down_kernel(
    x, x_scales, weights, scales, out, share, ids, experts, n_ids, n_columns, n_rows,
    x_scale_row, x_scale_column, scale_expert, scale_row, scale_column, out_stride,
    STEPS: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    of_numbers: gl.constexpr = gl.NVMMASharedLayout(_SIZE, 8, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    rows = gl.allocate_shared_memory(gl.float8e4nv, [STEPS, _SIZE, _SIZE], of_numbers)
    columns = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, _SIZE, _SIZE], of_numbers)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barrier)
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    memory = (rows, columns, full, free)
    given = (out, x_scales, scales, share, ids, experts, n_ids)
    sizes = (n_columns, n_rows)
    strides = (x_scale_row, x_scale_column, scale_expert, scale_row, scale_column, out_stride)
    gl.warp_specialize(
        [
            (_multiply, (given, memory, sizes, strides, 0, STEPS, PROGRAMS)),
            (_multiply, (given, memory, sizes, strides, 1, STEPS, PROGRAMS)),
            (_load, (x, weights, experts, n_ids, memory, n_columns, STEPS, PROGRAMS)),
        ],
        [4, 1],
        [_MULTIPLIES, _COPIES],
    )


def multiply_(out: Tensor, x: Quantised, weights: Quantised, share: Tensor, rows: Rows) -> None:
    """Computes what `block_experts.multiply_` computes; see `can_multiply_down`. `rows`: in blocks
    of GROUP.
    """
    n_columns, depth = weights.numbers.shape[1:]
    programs = torch.cuda.get_device_properties(out.device).multi_processor_count
    _down_kernel[(programs,)](
        boxes_of(x.numbers), x.scales, boxes_of(weights.numbers.view(-1, depth)), weights.scales,
        out, share, *rows, n_columns, len(out),
        *x.scales.stride(), *weights.scales.stride(), out.stride(0),
        STEPS=depth // GROUP, PROGRAMS=programs, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
