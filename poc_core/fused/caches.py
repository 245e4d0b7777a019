"""Writes keys and values into a paged cache, with the same results as vLLM's operation.

A program handles one head of several tokens. vLLM starts a block of threads for each token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens per program.
_TOKENS = 32


@triton.jit
def _stored(number, scale, cache, SCALES: tl.constexpr):
    if SCALES:
        number = number.to(tl.float32)
        number = tl.div_rn(number, tl.load(scale) + tl.zeros_like(number))
    return number.to(cache.dtype.element_ty)


@triton.jit(do_not_specialize=["n_tokens"])  # n_tokens varies; each specialisation is compiled
def _write_kernel(
    keys, values, key_cache, value_cache, slots, key_scale, value_scale, n_tokens,
    key_stride, value_stride, page_size, page_stride, slot_stride, head_stride,
    TOKENS: tl.constexpr, HEAD: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token, token < n_tokens, other=-1)
    inside = (slot >= 0)[:, None]
    to = slot // page_size * page_stride + slot % page_size * slot_stride + head * head_stride
    column = tl.arange(0, HEAD)[None, :]
    to = to[:, None] + column
    column += head * HEAD
    key = tl.load(keys + token[:, None] * key_stride + column, inside, other=0.0)
    tl.store(key_cache + to, _stored(key, key_scale, key_cache, SCALES), inside)
    value = tl.load(values + token[:, None] * value_stride + column, inside, other=0.0)
    tl.store(value_cache + to, _stored(value, value_scale, value_cache, SCALES), inside)


def can_write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Returns True if `write_` supports these keys and values (tokens, heads, head), 16-bit, and
    these caches (pages, page, heads, head), 8-bit or of the same dtype.
    """
    head = keys.shape[-1]
    return (
        keys.dim() == values.dim() == 3
        and keys.dtype == values.dtype
        and keys.element_size() == 2
        and all(one.stride()[1:] == (head, 1) for one in (keys, values))
        and keys.shape[1:] == values.shape[1:] == key_cache.shape[2:]
        and key_cache.shape == value_cache.shape
        and key_cache.stride() == value_cache.stride()
        and key_cache.stride(3) == 1
        and head >= 16
        and head & (head - 1) == 0  # a block size of Triton
        and (key_cache.dtype == value_cache.dtype)
        and (key_cache.dtype == keys.dtype or key_cache.element_size() == 1)
    )


def write_(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor,
    key_scale: Tensor, value_scale: Tensor,
) -> None:  # fmt: skip
    """Writes each token's keys and values to the token's slot. Skips tokens with negative slots.

    `slots`: int64 (tokens,). For 8-bit caches, numbers are divided by their scale (1,) and rounded
    to float8_e4m3fn. See `can_write`.
    """
    scales = key_cache.dtype != keys.dtype
    if scales:
        key_cache, value_cache = (x.view(torch.float8_e4m3fn) for x in (key_cache, value_cache))
    n_heads, head = keys.shape[1:]
    _write_kernel[(triton.cdiv(len(slots), _TOKENS), n_heads)](
        keys, values, key_cache, value_cache, slots, key_scale, value_scale, len(slots),
        keys.stride(0), values.stride(0), key_cache.shape[1], *key_cache.stride()[:3],
        TOKENS=_TOKENS, HEAD=head, SCALES=scales, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
