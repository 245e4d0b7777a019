"""Computes logprobs and ranks of known tokens, and each row's best tokens, in one pass over logits.

A token's rank is the number of logits in its row that are at least as large as the token's logit.
Each Triton program reads one block of columns of a row. torch then combines the results of the
blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Best tokens that are found in each block of columns: as many as the network requests. Requests for
# fewer tokens use the kernel too.
MOST_BEST = 5
# Columns of one block.
_BLOCK = 8192
_WARPS = 8
# Replaces logits of -inf. The kernel marks found tokens with -inf, so no token is found twice.
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _parts_kernel(
    logits, stride, n_columns, tokens, inverse, keys, ids, peaks, sums, counts,
    BEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
    first = tl.program_id(1) * BLOCK
    places = tl.arange(0, BLOCK)
    inside = first + places < n_columns
    here = logits + row * stride
    value = tl.load(here + first + places, inside, other=float("-inf")).to(tl.float32)
    own = tl.load(here + tl.load(tokens + row)).to(tl.float32)
    tl.store(counts + part, tl.sum(((value >= own) & inside).to(tl.int32), 0))

    key = tl.where(inside, tl.maximum(value, _LOWEST), float("-inf"))
    peak = tl.max(key, 0)
    tl.store(peaks + part, peak)
    tl.store(sums + part, tl.sum(tl.exp((value - peak) * inverse), 0))
    for n in tl.static_range(BEST):
        best, place = tl.max(key, 0, return_indices=True)
        tl.store(keys + part * BEST + n, best)
        tl.store(ids + part * BEST + n, first + place)
        key = tl.where(places == place, float("-inf"), key)


def scored(
    logits: Tensor, tokens: Tensor, temperature: float, n_best: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns token ids, the logprobs of these tokens, and the ranks of the known tokens.

    `logits`: (n, vocabulary), not yet divided by `temperature`. `tokens`: (n,), the id of one known
    token per row. `n_best`: the number of best tokens per row, at most MOST_BEST. The returned ids
    (n, 1 + n_best) are, in each row, the known token and then the best tokens. The logprobs have
    the same shape, and the ranks have the shape (n,). workers/vllm/chat/rows.py has the same
    computation in plain PyTorch.
    """
    n, vocabulary = logits.shape
    tokens = tokens.clone()  # aligned: an unaligned tensor would need another compilation
    n_parts = triton.cdiv(vocabulary, _BLOCK)
    peaks, sums = (logits.new_empty(n, n_parts, dtype=torch.float32) for _ in range(2))
    counts = logits.new_empty(n, n_parts, dtype=torch.int32)
    keys = logits.new_empty(n, n_parts * MOST_BEST, dtype=torch.float32)
    ids = logits.new_empty(n, n_parts * MOST_BEST, dtype=torch.int32)
    _parts_kernel[(n, n_parts)](
        logits, logits.stride(0), vocabulary, tokens, 1 / temperature, keys, ids, peaks, sums,
        counts, BEST=MOST_BEST, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    chosen = tokens[:, None]
    if n_best:
        best = ids.gather(-1, keys.topk(n_best, dim=-1).indices)
        chosen = torch.cat([chosen, best.to(chosen.dtype)], -1)
    peak = peaks.amax(-1, keepdim=True)
    total = (sums * ((peaks - peak) / temperature).exp()).sum(-1, keepdim=True).log()
    found = logits.gather(-1, chosen).to(torch.float32)
    return chosen, (found - peak) / temperature - total, counts.sum(-1)
