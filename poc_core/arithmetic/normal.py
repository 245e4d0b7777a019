"""Computes standard normal random numbers from hashes in one pass over memory (protocol.md, section
1).
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_BLOCK = 1024


@triton.jit
def _unit(key, seed):
    """Returns float32(hash(key, seed)) / 2^32."""
    k = key * 0xCC9E2D51
    k = (k << 15) | (k >> 17)
    h = seed ^ (k * 0x1B873593)
    h = (h << 13) | (h >> 19)
    h = h * 5 + 0xE6546B64
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return h.to(tl.float32) * 2.3283064365386963e-10  # 2^-32, exact


@triton.jit
def _normal_kernel(out, seeds, n, half, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    seed = tl.load(seeds + row).to(tl.uint32, bitcast=True)
    first = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = first < half
    u1 = tl.maximum(_unit(first.to(tl.uint32), seed), 1e-10)
    u2 = _unit((first + half).to(tl.uint32), seed)
    # torch's kernels use libdevice's functions too; Triton's own log and cos are less accurate.
    radius = libdevice.sqrt_rn(libdevice.log(u1) * -2.0)
    angle = u2 * 6.283185307179586
    at = out + row.to(tl.int64) * row_stride + first
    tl.store(at, (libdevice.cos(angle) * radius).to(out.dtype.element_ty), inside)
    # An odd n leaves out the last of the second half.
    tl.store(
        at + half,
        (libdevice.sin(angle) * radius).to(out.dtype.element_ty),
        inside & (first + half < n),
    )


def normal_(out: Tensor, seeds: Tensor) -> None:
    """Writes standard normal random numbers to out (rows, n), in which each row is contiguous. Row
    r is seeded with seeds[r].

    `seeds`: int32 (rows,) with the bits of uint32 seeds.
    """
    rows, n = out.shape
    half = (n + 1) // 2
    # The rows are the grid's second dimension, whose limit is 65,535.
    for low in range(0, rows, 65_535):
        part = out[low : low + 65_535]
        grid = (triton.cdiv(half, _BLOCK), part.shape[0])
        _normal_kernel[grid](part, seeds[low:], n, half, out.stride(0), BLOCK=_BLOCK)
