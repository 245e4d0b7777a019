"""Applies the rotary embedding to queries and keys in place.

The results are bit-identical to vLLM's operation, which computes in float32 and rounds once. Each
Triton program computes one token, and loads the token's angles once for all heads.
"""

import triton
import triton.language as tl
from torch import Tensor

# Heads that a program rotates at a time.
_HEADS = 16


@triton.jit
def _turn(at, n_heads, cos, sin, HEAD: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr):
    columns = tl.arange(0, HALF)
    for first in range(0, n_heads, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = (head < n_heads)[:, None]
        low = at + head[:, None] * HEAD + columns[None, :]
        x = tl.load(low, inside, other=0.0).to(tl.float32)
        y = tl.load(low + HALF, inside, other=0.0).to(tl.float32)
        tl.store(low, (x * cos - y * sin).to(at.dtype.element_ty), inside)
        tl.store(low + HALF, (y * cos + x * sin).to(at.dtype.element_ty), inside)


@triton.jit
def _rotary_kernel(
    query, key, positions, angles, query_stride, key_stride, n_query, n_key,
    HEAD: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    own = angles + tl.load(positions + token) * (2 * HALF) + tl.arange(0, HALF)
    cos = tl.load(own).to(tl.float32)[None, :]
    sin = tl.load(own + HALF).to(tl.float32)[None, :]
    _turn(query + token * query_stride, n_query, cos, sin, HEAD, HALF, HEADS)
    _turn(key + token * key_stride, n_key, cos, sin, HEAD, HALF, HEADS)


def can_rotate(query: Tensor, key: Tensor, head: int, angles: Tensor) -> bool:
    """Returns True if `rotate_` supports these tensors: 16-bit, and with complete heads in each row
    of `query` and `key`.

    `head`: the size of a head.
    """
    half = angles.shape[1] // 2
    return (
        query.dtype == key.dtype == angles.dtype
        and query.element_size() == 2
        and query.dim() == key.dim() == angles.dim() == 2
        and query.stride(1) == key.stride(1) == 1
        and query.shape[1] % head == key.shape[1] % head == 0
        and angles.is_contiguous()
        and angles.shape[1] <= head
        and half >= 16
        and half & (half - 1) == 0  # a power of two, as Triton requires
    )


def rotate_(query: Tensor, key: Tensor, positions: Tensor, head: int, angles: Tensor) -> None:
    """Applies the rotary embedding to `query` and `key` in place. See `can_rotate`.

    The pairs (i, i + n/2) of the first n numbers of each head are rotated by the angles of the
    token's position. `query`, `key`: (tokens, heads * head). `positions`: (tokens,). `head`: the
    size of a head. `angles`: (positions, n), first cosines, then sines. Products of 16-bit numbers
    are exact in float32, so the order and the fusion of operations change no bit.
    """
    _rotary_kernel[(len(query),)](
        query, key, positions, angles, query.stride(0), key.stride(0),
        query.shape[1] // head, key.shape[1] // head,
        HEAD=head, HALF=angles.shape[1] // 2, HEADS=_HEADS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
