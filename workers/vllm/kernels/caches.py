"""Writes keys and values of attention to a paged KV cache, with the same results as vLLM's
operation.

Each Triton program writes one head of several tokens. In vLLM, a block of threads writes all heads
of one token.
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
    """Returns True if `write_` supports these tensors.

    `keys`, `values`: (tokens, heads, head size), 16-bit. `key_cache`, `value_cache`: (pages, slots
    per page, heads, head size), with 8-bit numbers or in the dtype of `keys`.
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
        and head & (head - 1) == 0  # a power of two, as Triton requires
        and (key_cache.dtype == value_cache.dtype)
        and (key_cache.dtype == keys.dtype or key_cache.element_size() == 1)
    )


def write_(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor,
    key_scale: Tensor, value_scale: Tensor,
) -> None:  # fmt: skip
    """Writes the keys and values of each token to the token's slot in the KV cache. Skips tokens
    whose slot is negative.

    `slots`: int64 (tokens,), page * slots per page + slot in the page. `key_scale`, `value_scale`:
    (1,). For 8-bit caches, keys and values are divided by their scale and rounded to float8_e4m3fn.
    For the other shapes see `can_write`.
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
