"""Operations of vLLM's that tests replace, and calls of them."""

from typing import Any

import torch
from torch import Tensor

SILU, QUANTISE = "_C::silu_and_mul_per_block_quant", "_C::per_token_group_fp8_quant"
CACHE = "_C_cache_ops::reshape_and_cache_flash"
GROUP = 128


def results(rows: int, columns: int, by_column: bool, device: str) -> tuple[Tensor, Tensor]:
    """Where numbers and scales go, filled with what nobody writes."""
    shape = (columns // GROUP, rows) if by_column else (rows, columns // GROUP)
    scales = torch.full(shape, -1.0, device=device)
    out = torch.full((rows, columns), 99.0, device=device).to(torch.float8_e4m3fn)
    return out, scales.t() if by_column else scales


def arguments(
    name: str, x: Tensor, by_column: bool = False, powers: bool = False
) -> tuple[tuple[Any, ...], Tensor, Tensor]:
    """A call of the operation as vLLM 0.25.1 makes it, and where its results go."""
    columns = x.shape[1] // 2 if name == SILU else x.shape[1]
    out, scales = results(len(x), columns, by_column, str(x.device))
    if name == SILU:
        return (out, x, scales, GROUP, None, False), out, scales
    rest = (GROUP, 1e-10, -448.0, 448.0, powers, by_column, False)
    return (x, out, scales, *rest), out, scales


def writing(
    rows: int, cache: torch.dtype, by_head: bool, device: str, head: int = 128
) -> tuple[Any, ...]:
    """A call that writes into the first pages of empty caches, as vLLM's FlashAttention makes it;
    its arguments. `by_head`: a page has one head after the other."""
    generator = torch.Generator(device).manual_seed(rows)
    qkv = torch.randn(rows, 12, head, generator=generator, device=device).bfloat16() * 40
    pages = rows // 16 + 3
    memory = torch.zeros(pages, 2, *((2, 16) if by_head else (16, 2)), head, device=device)
    memory = memory.to(cache)
    caches = (memory.transpose(2, 3) if by_head else memory).unbind(1)
    slots = torch.randperm(16 * pages, generator=generator, device=device)[:rows]
    slots[::5] = -1
    scales = torch.tensor([[1.5], [0.7]], device=device)
    name = "auto" if cache == qkv.dtype else "fp8"
    return qkv[:, 8:10], qkv[:, 10:], *caches, slots, name, *scales
