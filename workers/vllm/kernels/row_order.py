"""Sorts the rows of each expert, so that Marlin's products are reproducible.

vLLM groups the rows of a mixture-of-experts layer by expert. The order of an expert's rows depends
on the order in which threads run. Marlin splits some products along the summed dimension, and adds
the parts in an order that depends on the block of the row. Without sorting, the results differ from
run to run (vllm-project/vllm#52525).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of the same expert with which a program compares its rows at a time.
_OTHERS = 128


@triton.jit(do_not_specialize=["n_rows", "n_blocks"])
def _order_kernel(
    rows, experts, n_used, ordered, n_rows, n_blocks,
    BLOCK: tl.constexpr, LANES: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    place = block * BLOCK + lane
    inside = (lane < BLOCK) & (place < n_rows)
    row = tl.load(rows + place, inside, other=0)
    n_used_blocks = tl.load(n_used) // BLOCK
    if block < n_used_blocks:
        expert = tl.load(experts + block)
        first = block
        neighbour = tl.load(experts + tl.maximum(first - 1, 0))
        while (first > 0) & (neighbour == expert):
            first -= 1
            neighbour = tl.load(experts + tl.maximum(first - 1, 0))
        last = block + 1
        neighbour = tl.load(experts + tl.minimum(last, n_blocks - 1))
        while (last < n_used_blocks) & (neighbour == expert):
            last += 1
            neighbour = tl.load(experts + tl.minimum(last, n_blocks - 1))
        n_before = tl.zeros([LANES], dtype=tl.int32)
        for begin in range(first * BLOCK, last * BLOCK, OTHERS):
            at = begin + tl.arange(0, OTHERS)
            other = tl.load(rows + at, at < last * BLOCK, other=2147483647)
            is_before = other[None, :] < row[:, None]
            # Blocks are padded with rows that do not exist and all have the same number.
            is_before |= (other[None, :] == row[:, None]) & (at[None, :] < place[:, None])
            n_before += tl.sum(is_before.to(tl.int32), axis=1)
        place = first * BLOCK + n_before
    tl.store(ordered + place, row, inside)


def in_order(rows: Tensor, experts: Tensor, n_used: Tensor, block: int) -> Tensor:
    """Returns a copy of `rows` in which the row numbers of each expert are in ascending order. Row
    numbers after the first `n_used` are unchanged.

    `rows`: (n,) int32, row numbers in complete blocks. `experts`: (blocks,) int32, the expert of
    each block; an expert's blocks are adjacent. `n_used`: (1,) int32, a multiple of `block`.
    `block`: the number of rows of a block.
    """
    ordered = torch.empty_like(rows)
    n_blocks = triton.cdiv(len(rows), block)
    _order_kernel[(n_blocks,)](
        rows, experts, n_used, ordered, len(rows), min(n_blocks, len(experts)),
        BLOCK=block, LANES=triton.next_power_of_2(block), OTHERS=_OTHERS, num_warps=4,
    )  # fmt: skip
    return ordered
