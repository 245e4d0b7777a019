"""Sorts the rows of a mixture-of-experts layer by expert. vLLM's moe_align_block_size counts the
rows in a single block of threads; this module uses all of the GPU. The rows of an expert are in
ascending order, which vLLM does not guarantee.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.vllm.kernels.experts import Rows

# Rows that a program sorts, and rows with which it compares each of them at a time.
_PART, _OTHERS = 256, 32


@triton.jit(do_not_specialize=["n_rows", "n_parts"])
def _count_kernel(chosen, counts, n_rows, n_parts, EXPERTS: tl.constexpr, PART: tl.constexpr):
    part = tl.program_id(0)
    row = part * PART + tl.arange(0, PART)
    # rows that do not exist, all in the last part, count as rows of expert 0
    expert = tl.load(chosen + row, row < n_rows, other=0).to(tl.int32)
    found = tl.histogram(expert, EXPERTS)
    index = tl.arange(0, EXPERTS)
    missing = tl.maximum((part + 1) * PART - n_rows, 0)
    tl.store(counts + index * n_parts + part, found - tl.where(index == 0, missing, 0))


@triton.jit(do_not_specialize=["n_rows", "n_parts"])
def _block_kernel(
    ends, ids, experts, n_ids, starts, n_rows, n_parts,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    count = tl.load(ends + (index + 1) * n_parts - 1)
    padded = (count + BLOCK - 1) // BLOCK * BLOCK
    end = tl.cumsum(padded, 0)
    if block == 0:
        tl.store(starts + index, end - padded)
        tl.store(n_ids, tl.sum(padded, 0))
    place = block * BLOCK
    expert = tl.sum((end <= place).to(tl.int32), 0)
    last = tl.sum(tl.where(index == expert, end - padded + count, 0), 0)
    tl.store(experts + block, tl.minimum(expert, EXPERTS - 1))
    lane = tl.arange(0, LANES)
    tl.store(ids + place + lane, n_rows + lane * 0, (lane < BLOCK) & (place + lane >= last))


@triton.jit(do_not_specialize=["n_rows", "n_parts"])
def _place_kernel(
    chosen, ends, starts, ids, n_rows, n_parts, PART: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    part = tl.program_id(0)
    row = part * PART + tl.arange(0, PART)
    inside = row < n_rows
    expert = tl.load(chosen + row, inside, other=0).to(tl.int32)
    place = tl.load(starts + expert) + tl.load(ends + expert * n_parts + part)
    n_later = tl.zeros((PART, OTHERS), tl.int32)
    for first in range(part * PART, (part + 1) * PART, OTHERS):
        other_row = first + tl.arange(0, OTHERS)
        other = tl.load(chosen + other_row, other_row < n_rows, other=-1).to(tl.int32)
        is_later = (other[None, :] == expert[:, None]) & (other_row[None, :] >= row[:, None])
        n_later += is_later.to(tl.int32)
    tl.store(ids + place - tl.sum(n_later, 1), row, inside)


def sorted_rows(chosen: Tensor, block: int, n_experts: int) -> Rows:
    """Returns the rows of a product in the order of their experts, each expert's in complete blocks
    of `block` rows. `chosen`: (tokens, experts per token), int32 or int64, each from 0 to
    n_experts - 1.
    """
    chosen, n = chosen.flatten(), chosen.numel()
    parts, lanes = triton.cdiv(n, _PART), triton.next_power_of_2(n_experts)
    # vLLM's sizes: each expert may have one block that is nearly empty
    blocks = triton.cdiv(n + n_experts * (block - 1), block)
    counts = chosen.new_empty(lanes, parts, dtype=torch.int32)
    ids = chosen.new_empty(blocks * block, dtype=torch.int32)
    experts = chosen.new_empty(blocks, dtype=torch.int32)
    n_ids, starts = (chosen.new_empty(size, dtype=torch.int32) for size in (1, lanes))
    _count_kernel[(parts,)](chosen, counts, n, parts, EXPERTS=lanes, PART=_PART)
    ends = counts.cumsum(1, dtype=torch.int32)
    _block_kernel[(blocks,)](
        ends, ids, experts, n_ids, starts, n, parts,
        EXPERTS=lanes, BLOCK=block, LANES=triton.next_power_of_2(block),
    )  # fmt: skip
    _place_kernel[(parts,)](chosen, ends, starts, ids, n, parts, PART=_PART, OTHERS=_OTHERS)
    return Rows(ids, experts, n_ids)
