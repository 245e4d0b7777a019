"""Deterministic random numbers, seeded by strings (protocol.md, section 1).

`normal` takes most of the time, because it computes up to 134 million hashes per batch. It stores
uint32 hashes in int32 tensors: int32 arithmetic wraps on every device, and moves half as many bytes
as int64. `murmur3_plain` computes the same hashes in int64, as the protocol defines them. Tests
compare `normal` with `murmur3_plain`.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from poc_core.arithmetic import fused

_C1 = 0xCC9E2D51
_C2 = 0x1B873593
_MASK = 0xFFFFFFFF

# Smallest u1: keeps ln(u1) finite when a hash is 0.
_MIN_U1 = 1e-10

# Keys per chunk. On a CPU, hashes (4 bytes a key) stay in the cache, and torch still uses several
# threads; fastest of 2^15 .. 2^20 on two cores. On an accelerator, chunks take a few 100 MB.
_CHUNK_KEYS_CPU = 1 << 19
_CHUNK_KEYS_DEVICE = 1 << 24

# The number of keys i for which `_key_part` is cached: 4 bytes each, at most 32 MiB a device.
_CACHED_KEYS = 1 << 23

_key_cache: dict[torch.device, Tensor] = {}


def seed_from_string(text: str) -> int:
    """Returns the first 4 bytes of the SHA-256 of `text` in UTF-8, as a big-endian uint32."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def stronger_seeds_from_string(text: str) -> list[int]:
    """Returns the SHA-256 of `text` in UTF-8 as 8 big-endian uint32 seeds. Requests with
    `poc_stronger_rng` use these seeds.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(digest[i : i + 4], "big") for i in range(0, 32, 4)]


def _bits(seeds: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Returns uint32 seeds as an int32 tensor (n,) on the device, with the same bits. Does not wait
    for the copy to the device.

    If `seeds` is a tensor, only the low 32 bits of each number are used.
    """
    if isinstance(seeds, Tensor):
        return seeds.to(device, torch.int32)
    bits = torch.from_numpy(np.array(seeds, dtype=np.uint32).view(np.int32))
    is_cuda = device.type == "cuda"
    return (bits.pin_memory() if is_cuda else bits).to(device, non_blocking=is_cuda)


def hash_bits(seeds: Sequence[int] | Tensor, n: int, device: torch.device) -> Tensor:
    """Returns hash(i, seed) for each seed and for i = 0 .. n-1: int32 (len(seeds), n).

    The int32 numbers have the bits of the uint32 hashes.
    """
    h = _bits(seeds, device)[:, None] ^ _key_part(0, n, device)
    return _mix_(h, torch.empty_like(h))


def smallest_hashes(seeds: Sequence[int] | Tensor, n: int, k: int, device: torch.device) -> Tensor:
    """Returns for each seed the k indices i < n with the smallest hash(i, seed): int64 (len(seeds),
    k).

    The index with the largest of these k hashes comes last. The other indices are in ascending
    order. Among equal hashes the smaller index is chosen (protocol.md, section 2.4).
    """
    # With a flipped sign bit, int32 numbers have the order of the uint32 hashes.
    chosen = (hash_bits(seeds, n, device) ^ -(1 << 31)).sort(dim=-1, stable=True).indices[:, :k]
    return torch.cat([chosen[:, :-1].sort(dim=-1).values, chosen[:, -1:]], dim=-1)


def uniform(seeds: Sequence[int], n: int, device: torch.device) -> Tensor:
    """Returns float32(hash(i, seed)) / 2^32 for each seed and for i = 0 .. n-1: float32
    (len(seeds), n) in [0, 1].
    """
    return _to_unit(hash_bits(seeds, n, device))


def normal(
    seeds: Sequence[int] | Tensor,
    n: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Returns standard normal random numbers (len(seeds), n). Row r is seeded with seeds[r].

    Computes by Box-Muller in float32, and then rounds once. `seeds`: uint32 integers, or an integer
    tensor whose low 32 bits are used. `out`: a tensor (len(seeds), n), with any strides, to which
    the numbers are written; None means a new tensor of `dtype`.
    """
    if out is None:
        out = torch.empty(len(seeds), n, dtype=dtype, device=device)
    if n == 0 or len(seeds) == 0:
        return out
    all_bits = _bits(seeds, device)
    if fused.is_on(device) and out.stride(1) == 1:
        from poc_core.arithmetic.normal import (
            normal_,  # here: only torch's CUDA builds include Triton
        )

        normal_(out, all_bits)
        return out
    bits = all_bits[:, None]
    half = (n + 1) // 2
    chunk = _CHUNK_KEYS_CPU if device.type == "cpu" else _CHUNK_KEYS_DEVICE
    columns = min(half, max(1, chunk // 2))
    rows = max(1, chunk // (2 * columns))
    for low in range(0, half, columns):
        high = min(half, low + columns)
        keys1 = _key_part(low, high, device)
        keys2 = _key_part(half + low, half + high, device)
        for row in range(0, len(seeds), rows):
            part = bits[row : row + rows]
            z0, z1 = _box_muller(part ^ keys1, part ^ keys2)
            target = out[row : row + rows]
            target[:, low:high] = z0
            end = min(n, half + high)  # an odd n leaves out the last z1
            target[:, half + low : end] = z1[:, : end - half - low]
    return out


def inputs(
    block_hash: str,
    public_key: str,
    nonces: Sequence[int],
    seq_len: int,
    hidden: int,
    device: torch.device,
    dtype: torch.dtype,
    stronger_rng: bool = False,
) -> Tensor:
    """Returns the input embeddings of the nonces: (n, seq_len, hidden) in `dtype`.

    `stronger_rng`: True to use eight seeds per nonce instead of one (protocol.md, section 1).
    """
    size = seq_len * hidden
    names = [f"{block_hash}_{public_key}_nonce{nonce}" for nonce in nonces]
    out = torch.empty(len(names), size, dtype=dtype, device=device)
    if not stronger_rng:
        normal([seed_from_string(name) for name in names], size, device, out=out)
    else:
        seeds = [stronger_seeds_from_string(name) for name in names]
        length = (size + 7) // 8
        for k in range(8):
            segment = out[:, k * length : (k + 1) * length]
            if segment.shape[1]:
                normal([s[k] for s in seeds], segment.shape[1], device, out=segment)
    return out.view(len(names), seq_len, hidden)


def token_ids(
    block_hash: str,
    public_key: str,
    nonces: Sequence[int],
    seq_len: int,
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Returns a token id for each position of the nonces' prefills: int32 (n, seq_len).

    The token id at position i is hash(i, seed of the nonce) mod vocab_size (protocol.md, section
    2.1).
    """
    seeds = [
        seed_from_string(f"{block_hash}_{public_key}_nonce{nonce}_input_ids") for nonce in nonces
    ]
    return ((hash_bits(seeds, seq_len, device).to(torch.int64) & _MASK) % vocab_size).to(
        torch.int32
    )


def _key_part(low: int, high: int, device: torch.device) -> Tensor:
    """Returns rotl(i * c1, 15) * c2 for i = low .. high-1: int32 (high - low,).

    This is the part of hash(i, seed) that does not depend on the seed. It is cached for i below
    _CACHED_KEYS.
    """
    if high > _CACHED_KEYS:
        return _compute_key_part(low, high, device)
    cached = _key_cache.get(device)
    if cached is None or high > cached.shape[0]:
        # A power of two, so that not every larger n needs a new tensor.
        size = min(_CACHED_KEYS, 1 << max(16, (high - 1).bit_length()))
        cached = _key_cache[device] = _compute_key_part(0, size, device)
    return cached[low:high]


def _compute_key_part(low: int, high: int, device: torch.device) -> Tensor:
    k = torch.arange(low, high, dtype=torch.int64, device=device) * _C1 & _MASK
    k = (k << 15 | k >> 17) & _MASK
    # Only the product's low 32 bits are kept, and no overflow beyond bit 63 changes them.
    return (k * _C2).to(torch.int32)


def _mix_(h: Tensor, scratch: Tensor) -> Tensor:
    """Completes hashes in place. Before the call, `h` (int32) contains seed ^ `_key_part`; after
    the call, hash(i, seed). Returns `h`. `scratch`: a tensor like `h`, which is overwritten.
    """
    # Arithmetic right shifts insert sign bits; the masks clear those bits.
    torch.bitwise_right_shift(h, 19, out=scratch).bitwise_and_(0x1FFF)
    h.bitwise_left_shift_(13).bitwise_or_(scratch)
    h.mul_(5).add_(0xE6546B64 - (1 << 32))
    torch.bitwise_right_shift(h, 16, out=scratch).bitwise_and_(0xFFFF)
    h.bitwise_xor_(scratch).mul_(0x85EBCA6B - (1 << 32))
    torch.bitwise_right_shift(h, 13, out=scratch).bitwise_and_(0x7FFFF)
    h.bitwise_xor_(scratch).mul_(0xC2B2AE35 - (1 << 32))
    torch.bitwise_right_shift(h, 16, out=scratch).bitwise_and_(0xFFFF)
    return h.bitwise_xor_(scratch)


def _to_unit(h: Tensor) -> Tensor:
    """Returns float32(hash) / 2^32 for uint32 hashes, whose bits are in `h` (int32).

    Both 16-bit halves of a hash are exact in float32. Only the sum of the halves is rounded.
    """
    high = (h >> 16).bitwise_and_(0xFFFF).to(torch.float32).mul_(2.0**-16)
    low = (h & 0xFFFF).to(torch.float32)
    return high.add_(low, alpha=2.0**-32)


def _box_muller(h1: Tensor, h2: Tensor) -> tuple[Tensor, Tensor]:
    scratch = torch.empty_like(h1)
    radius = _to_unit(_mix_(h1, scratch)).clamp_(min=_MIN_U1).log_().mul_(-2.0).sqrt_()
    angle = _to_unit(_mix_(h2, scratch)).mul_(2.0 * math.pi)
    z0 = torch.cos(angle).mul_(radius)
    return z0, angle.sin_().mul_(radius)


def murmur3_plain(keys: Tensor, seed: int | Tensor) -> Tensor:
    """Returns hash(key, seed) for each key: int64 in 0 .. 2^32-1.

    `keys`: int64. `seed`: an integer, or an int64 tensor that broadcasts against `keys`.
    """
    k = keys * _C1 & _MASK
    k = (k << 15 | k >> 17) & _MASK
    k = k * _C2 & _MASK
    h = k ^ seed
    h = (h << 13 | h >> 19) & _MASK
    h = (h * 5 + 0xE6546B64) & _MASK
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK
    return h ^ h >> 16
