"""Quantises activations to 8-bit floats (float8_e4m3fn), with one scale per group of 128 columns.

The results are bit-identical to the CUDA operations of vLLM 0.25.1, according to their machine
code. All arithmetic except `rounded_silu` is in float32, and is not rounded to the model's dtype.
The scale of a group is its largest absolute value divided by 448. Each number is divided by the
scale, clamped to -448 .. 448, and rounded to nearest, ties to even. If DeepGEMM is installed, vLLM
rounds scales up to powers of two.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

# Columns that share a scale.
GROUP = 128
# Groups of one program.
_GROUPS = 16
_WARPS = 4
# The format's largest number.
_MOST = tl.constexpr(448.0)
# vLLM's smallest scale after an activation: 1 / (448 * 512).
_LEAST_SCALE = tl.constexpr(4.3596542127488646656e-06)
# vLLM's smallest scale before rounding to a power of two, and its smallest peak.
_LEAST_POWER = tl.constexpr(1e-10)
_LEAST_PEAK = tl.constexpr(1e-10)


@triton.jit
def _quotient(x, scale):
    """Returns x / scale, rounded to nearest.

    Divides only once per scale: multiplies each x by 1 / scale, and corrects the product by its
    exact remainder. A quotient of 0 keeps its sign.
    """
    inverse, _ = tl.broadcast(tl.div_rn(1.0, scale), x)
    scale, _ = tl.broadcast(scale, x)
    first = x * inverse
    left = tl.fma(-first, scale, x)  # the exact remainder
    return tl.where(first == 0.0, first, tl.fma(left, inverse, first))


@triton.jit
def _power_above(scale):
    """Returns the smallest power of two that is at least `scale`.

    vLLM computes this power with logarithms. The results are equal, because scales are computed
    from 16-bit numbers: a scale that is no power of two differs from the nearest power of two by
    more than the rounding error of a logarithm.
    """
    bits = tl.maximum(scale, _LEAST_POWER).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def silu(gate, up):
    """Returns silu(gate) * up in float32."""
    return gate * libdevice.rcp_rn(1.0 + libdevice.exp(-gate)) * up


@triton.jit
def rounded_silu(gate, up, dtype: tl.constexpr):
    """Returns silu(gate) * up in float32. Rounds to `dtype` after silu and again after the product,
    as vLLM's separate activation kernel does.
    """
    opened = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
    return (opened * up).to(dtype).to(tl.float32)


@triton.jit
def quantised(opened, POWERS: tl.constexpr):
    """Returns the rows of `opened` divided by their scales, not yet rounded to 8 bits, and the
    scales.

    `opened`: activations (rows, GROUP). `POWERS`: True to round scales up to powers of two.
    """
    peak = tl.max(tl.abs(opened), 1)
    if POWERS:
        scale = _power_above(tl.div_rn(tl.maximum(peak, _LEAST_PEAK), _MOST))
    else:
        scale = tl.maximum(tl.div_rn(peak, _MOST), _LEAST_SCALE)
    return tl.maximum(tl.minimum(_quotient(opened, scale[:, None]), _MOST), -_MOST), scale


@triton.jit
def _silu_kernel(out, scales, x, n_groups, row_groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    groups = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    inside = (groups < n_groups)[:, None]
    columns = tl.arange(0, GROUP)[None, :]
    # A row has its gates first, then as many numbers of `up`.
    at = (groups + groups // row_groups * row_groups)[:, None] * GROUP + columns
    gate = tl.load(x + at, inside, other=0.0).to(tl.float32)
    up = tl.load(x + at + row_groups * GROUP, inside, other=0.0).to(tl.float32)
    number, scale = quantised(silu(gate, up), False)
    tl.store(scales + groups, scale, groups < n_groups)
    tl.store(out + groups[:, None] * GROUP + columns, number.to(out.dtype.element_ty), inside)


def silu_and_quantise_(out: Tensor, scales: Tensor, x: Tensor) -> None:
    """Computes silu(gate) * up of `x`, quantises the result, and writes it to `out` and `scales`.

    `x`: (rows, 2 n), 16-bit; the first n columns are gates, the other n columns are `up`. `out`:
    (rows, n), float8_e4m3fn. `scales`: (rows, n / 128), float32. All tensors are contiguous.
    """
    n_groups = scales.numel()
    _silu_kernel[(triton.cdiv(n_groups, _GROUPS),)](
        out, scales, x, n_groups, scales.shape[-1],
        GROUPS=_GROUPS, GROUP=GROUP, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _quantise_kernel(
    out, scales, x, n_groups, row_groups, row_stride, column_stride, least,
    POWERS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    groups = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    inside = (groups < n_groups)[:, None]
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + at, inside, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(value), 1), least)
    scale = tl.div_rn(peak, _MOST)
    if POWERS:
        scale = _power_above(scale)
    row = groups // row_groups
    place = row * row_stride + (groups - row * row_groups) * column_stride
    tl.store(scales + place, scale, groups < n_groups)
    number = tl.minimum(tl.maximum(_quotient(value, scale[:, None]), -_MOST), _MOST)
    tl.store(out + at, number.to(out.dtype.element_ty), inside)


def quantise_(out: Tensor, scales: Tensor, x: Tensor, least: float, powers: bool = False) -> None:
    """Quantises x (rows, n), 16-bit and contiguous, and writes the result to `out` and `scales`.

    `out`: (rows, n), float8_e4m3fn, contiguous. `scales`: (rows, n / 128), float32, any strides.
    `least`: the scale of a group whose largest absolute value is smaller than `least` is computed
    from `least` instead. `powers`: True to round scales up to powers of two.
    """
    n_groups = scales.numel()
    _quantise_kernel[(triton.cdiv(n_groups, _GROUPS),)](
        out, scales, x, n_groups, scales.shape[-1], scales.stride(0), scales.stride(1), least,
        POWERS=powers, GROUPS=_GROUPS, GROUP=GROUP, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
