"""The fused kernels between the matrix products give the bits of plain torch, by Triton's
interpreter, which wants a process that has it from the beginning. The tests in workers/vllm/kernels
hold them against vLLM's own on a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.harness.interpreted import run_interpreted

pytestmark = pytest.mark.xdist_group("interpreted")

GROUP, MOST = 128, 448.0
LEAST_SCALE = 1 / (MOST * 512)


def all_sizes(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows from denormal numbers to large ones, with zeros of both signs; one row is zeros."""
    generator = torch.Generator().manual_seed(columns)
    exponents = torch.linspace(-135, 60 if dtype is torch.bfloat16 else 12, rows).double()
    x = torch.randn(rows, columns, generator=generator).double() * exponents.exp2()[:, None]
    x = x.to(dtype)
    x[:, ::37], x[:, 1::37], x[rows // 2] = 0.0, -0.0, 0.0
    return x.to(device)


def empty_for(
    rows: int, columns: int, by_column: bool, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Where numbers and scales go, filled with what no kernel writes."""
    out = torch.full((rows, columns), 99.0, device=device).to(dtype)
    shape = (columns // GROUP, rows) if by_column else (rows, columns // GROUP)
    scales = torch.full(shape, -1.0, device=device)
    return out, scales.t() if by_column else scales


def quantised(x: Tensor, scales: Tensor) -> Tensor:
    """Of x (rows, columns), float32: numbers that are yet to be rounded to 8 bits."""
    return (x.view(-1, GROUP) / scales.reshape(-1, 1)).clamp(-MOST, MOST).view_as(x)


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def peaks(x: Tensor) -> Tensor:
    return x.view(len(x), -1, GROUP).abs().amax(-1)


def assert_same(theirs: tuple[Tensor, Tensor], ours: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(theirs[1], ours[1])
    assert torch.equal(theirs[0].view(torch.uint8), ours[0].view(torch.uint8))


def compare_interpreted() -> None:
    """Numbers as float32: the interpreter rounds to 8 bits otherwise than devices. Both sides take
    the exponential from numpy."""
    from workers.vllm.kernels import quantise  # here: nothing else of this module needs Triton

    vars(quantise)["libdevice"] = SimpleNamespace(exp=lambda x: x.exp(), rcp_rn=lambda x: 1.0 / x)
    for columns, dtype in ((GROUP, torch.float16), (3 * GROUP, torch.bfloat16)):
        x = all_sizes(21, columns, dtype, "cpu")
        for by_column in (False, True):
            out, scales = empty_for(21, columns, by_column, torch.float32, "cpu")
            quantise.quantise_(out, scales, x, 1e-10)
            expected = peaks(x.float()).clamp(min=1e-10) / MOST
            assert_same((rounded(quantised(x.float(), expected)), expected), (rounded(out), scales))
            quantise.quantise_(out, scales, x, 1e-10, powers=True)
            expected = expected.clamp(min=1e-10).double().log2().ceil().exp2().float()
            assert_same((rounded(quantised(x.float(), expected)), expected), (rounded(out), scales))
        x = all_sizes(21, 2 * columns, dtype, "cpu")
        gate, up = x.float().chunk(2, -1)
        opened = gate * (1 / (1 + torch.from_numpy(np.exp(-gate.numpy())))) * up
        expected = (peaks(opened) / MOST).clamp(min=LEAST_SCALE)
        out, scales = empty_for(21, columns, False, torch.float32, "cpu")
        quantise.silu_and_quantise_(out, scales, x)
        assert_same((rounded(quantised(opened, expected)), expected), (rounded(out), scales))


def compare_norms() -> None:
    """With vLLM's expression of MiniMax's norms, rounded to no smaller format: bit for bit where
    torch adds, and where the kernel adds but for a sum's last bits, which a CPU adds otherwise."""
    from workers.vllm.kernels import norms

    vars(norms)["libdevice"] = SimpleNamespace(rsqrt=lambda x: x.rsqrt())
    for columns in (2 * GROUP, 2176):
        x = torch.randn(17, columns + 64, generator=torch.Generator().manual_seed(1))[:, 64:]
        weight = torch.linspace(-2, 2, columns)
        expected = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6) * weight
        assert norms.can_norm(x)
        torch.testing.assert_close(norms.rms_norm(x, weight, 1e-6), expected, rtol=1e-6, atol=0)

    for columns in (64, GROUP, 256):
        x = torch.randn(9, 3 * columns, generator=torch.Generator().manual_seed(1)).view(9, 3, -1)
        weight, out = torch.linspace(-2, 2, columns), torch.empty(9, 2, columns)
        norms.norm_heads_(out, x[:, 1:], weight, 1e-6)
        expected = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6) * weight
        torch.testing.assert_close(out, expected[:, 1:], rtol=1e-6, atol=0)


def compare_rotations() -> None:
    """Of queries and keys that lie in wider rows, all of a head turned and a half of it."""
    from workers.vllm.kernels import rotary

    generator = torch.Generator().manual_seed(1)
    for head, turned in ((64, 64), (GROUP, 64)):
        rows = torch.randn(7, 21 * head, generator=generator).half()
        angles = torch.randn(50, turned, generator=generator).half()
        positions = torch.tensor([0, 49, 3, 3, 20, 7, 11])
        query, keys = rows[:, : 18 * head], rows[:, 18 * head : 20 * head]
        expected = rows.clone()
        pairs = expected[:, : 20 * head].view(7, 20, head)
        x, y = (one.float() for one in pairs[..., :turned].clone().chunk(2, -1))
        cos, sin = (one.float()[:, None] for one in angles[positions].chunk(2, -1))
        pairs[..., :turned] = torch.cat([x * cos - y * sin, y * cos + x * sin], -1).half()
        assert rotary.can_rotate(query, keys, head, angles)
        assert not rotary.can_rotate(query, keys, head, angles.float())
        assert not rotary.can_rotate(query, keys, head, angles[:, :-16].contiguous())
        rotary.rotate_(query, keys, positions, head, angles)
        assert torch.equal(rows, expected)


def compare_caches() -> None:
    """Pages of heads side by side and of one head after the other, some tokens without a place."""
    from workers.vllm.kernels import caches

    torch.manual_seed(0)
    for by_head in (False, True):
        # As in vLLM a page has keys and values, and a token's row queries too.
        rows = torch.randn(70, 4, 3 * 32).half()
        keys, values = rows[:, 1:3, :32].contiguous(), rows.view(70, 12, 32)[:, 5:7]
        memory = torch.zeros(9, 2, 2, 16, 32) if by_head else torch.zeros(9, 2, 16, 2, 32)
        memory = memory.half()
        key_cache, value_cache = (memory.transpose(2, 3) if by_head else memory).unbind(1)
        slots = torch.randperm(9 * 16)[:70]
        slots[::9] = -1
        assert caches.can_write(keys, values, key_cache, value_cache)
        assert not caches.can_write(keys, values, key_cache, value_cache.contiguous())
        assert not caches.can_write(keys.float(), values.float(), key_cache, value_cache)
        caches.write_(keys, values, key_cache, value_cache, slots, *torch.ones(2, 1))
        for given, cache in ((keys, key_cache), (values, value_cache)):
            expected = torch.zeros(9, 16, 2, 32).half()
            expected.view(-1, 2, 32)[slots[slots >= 0]] = given[slots >= 0]
            assert torch.equal(cache, expected)


def test_the_interpreted_kernels_are_plain_torch() -> None:
    for call in ("interpreted", "norms", "rotations", "caches"):
        run_interpreted(__name__, f"compare_{call}()")
