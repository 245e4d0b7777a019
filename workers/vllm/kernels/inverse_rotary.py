"""Inverts the rotary embedding of attention outputs, and quantises them for DeepSeek-V4's output
projection.

The results are bit-identical to vLLM's operation. Each Triton program computes several heads of
several tokens. In vLLM, each program computes one head of one token.
"""

import triton
import triton.language as tl
from torch import Tensor

from workers.vllm.kernels.quantise import GROUP

# Tokens per program (the scales of these tokens are adjacent in memory), and heads per token.
_TOKENS, _HEADS = 4, 4
_MOST = tl.constexpr(448.0)  # the format's largest number
_LEAST_PEAK = tl.constexpr(1e-10)


@triton.jit
def _unrotate_kernel(
    out, scales, x, positions, angles, n_tokens, n_padded, token_stride, head_stride, angle_stride,
    out_group, out_token, scale_group, scale_column, heads,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, TOKENS * HEADS)
    token = (tl.program_id(0) * TOKENS + row % TOKENS).to(tl.int64)
    head = (tl.program_id(1) * HEADS + row // TOKENS).to(tl.int64)
    inside = token < n_tokens
    column = tl.arange(0, GROUP)[None, :]
    at = token * token_stride + head * head_stride
    numbers = ()
    for low in tl.static_range(0, HEAD, GROUP):
        own = x + at[:, None] + low + column
        numbers += (tl.load(own, inside[:, None], other=0.0),)
    position = tl.load(positions + token, inside, other=0)
    group = head // heads
    place = head % heads
    to = out + (group * out_group + token * out_token + place * HEAD)[:, None] + column
    to_scale = scales + group * scale_group + token + place * (HEAD // GROUP) * scale_column
    for low in tl.static_range(0, HEAD, GROUP):
        number = numbers[low // GROUP].to(tl.float32)
        if low + GROUP > HEAD - 2 * HALF:
            even, odd = tl.split(tl.reshape(number, (TOKENS * HEADS, GROUP // 2, 2)))
            pair = tl.arange(0, GROUP // 2)[None, :] + (low // 2 - (HEAD // 2 - HALF))
            angle = angles + position[:, None] * angle_stride + pair
            turns = inside[:, None] & (pair >= 0)
            cos = tl.load(angle, turns, other=1.0)
            sin = tl.load(angle + HALF, turns, other=0.0)
            turned_even = even * cos + odd * sin
            turned_odd = odd * cos - even * sin
            even = tl.where(turns, turned_even, even)
            odd = tl.where(turns, turned_odd, odd)
            number = tl.reshape(tl.join(even, odd), (TOKENS * HEADS, GROUP))
        peak = tl.maximum(tl.max(tl.abs(number), 1), _LEAST_PEAK)
        scale = tl.math.exp2(tl.ceil(tl.log2(peak * (1.0 / _MOST))))
        # The scale is a power of two, so multiplying by its inverse is an exact division.
        number = tl.clamp(number * (1.0 / scale)[:, None], -_MOST, _MOST)
        tl.store(to + low, number.to(out.dtype.element_ty), inside[:, None])
        # Scales are padded, because the following product requires it.
        own = to_scale + (low // GROUP) * scale_column
        tl.store(own, tl.where(inside, scale, 0.0), token < n_padded)


def can_unrotate(x: Tensor, positions: Tensor, angles: Tensor, heads: int) -> bool:
    """Returns True if `unrotate_and_quantise_` supports these tensors.

    `x`: (tokens, groups * heads, head size), 16-bit. `positions`: (tokens,). `angles`: (positions,
    n), float32. `heads`: the number of heads per group.
    """
    n_heads, head = x.shape[-2:]
    half = angles.shape[-1] // 2
    return (
        x.dim() == 3
        and x.element_size() == 2
        and x.stride(2) == 1
        and n_heads % heads == n_heads % _HEADS == 0
        and head >= GROUP
        and head & (head - 1) == 0  # a power of two, as Triton requires
        and angles.dim() == 2
        and angles.element_size() == 4
        and angles.stride(1) == 1
        and 2 * half <= head
        and positions.shape == x.shape[:1]
        and positions.is_contiguous()
    )


def unrotate_and_quantise_(
    out: Tensor, scales: Tensor, x: Tensor, positions: Tensor, angles: Tensor
) -> None:
    """Inverts the rotary embedding of `x`, quantises the result, and writes it to `out` and
    `scales`. See `can_unrotate`.

    `x`: (tokens, heads, head size). The last n numbers of each head are rotated in pairs of
    neighbours, by the angles of the token's position. `angles`: (positions, n), first cosines, then
    sines. `out`: (groups, tokens, heads per group * head size), float8_e4m3fn. `scales`: (groups,
    tokens, columns of `out` / 128), powers of two in float32. The memory of `scales` is ordered by
    column and then by token, and each column is padded with zeros to a multiple of four tokens.
    """
    n_tokens, n_heads, head = x.shape
    padded = triton.cdiv(n_tokens, 4) * 4
    _unrotate_kernel[(triton.cdiv(padded, _TOKENS), n_heads // _HEADS)](
        out, scales, x, positions, angles, n_tokens, padded, x.stride(0), x.stride(1),
        angles.stride(0), out.stride(0), out.stride(1), scales.stride(0), scales.stride(2),
        n_heads // len(out), TOKENS=_TOKENS, HEADS=_HEADS, HEAD=head, HALF=angles.shape[1] // 2,
        GROUP=GROUP, num_warps=8,
    )  # fmt: skip
