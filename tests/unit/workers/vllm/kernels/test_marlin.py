"""vLLM's Marlin layout of experts in 4 bits, and Marlin's order of sums."""

from inspect import signature
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.harness.interpreted import run_interpreted
from tests.harness.marks import needs_vllm

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ROWS, DEPTH = 128, 256


def marlin_words(codes: Tensor) -> Tensor:
    """Codes (depth, rows) of 4 bits as vLLM's gptq_marlin_repack lays them out: eight in a word,
    (depth / 16, 2 * rows) int32."""
    depth, rows = codes.shape
    tiles = codes.reshape(depth // 16, 16, rows // 16, 16).permute(0, 2, 1, 3).reshape(-1, 1024)
    order = [
        16 * row + lane // 4 + 8 * half + 256 * tile
        for lane in range(32)
        for tile in range(4)
        for row_half in (0, 1)
        for half in (0, 1)
        for row in (2 * (lane % 4) + row_half, 2 * (lane % 4) + row_half + 8)
    ]
    numbers = tiles[:, order].reshape(depth // 16, -1, 8).long()
    words = (numbers << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def marlin_scales(scales: Tensor) -> Tensor:
    """Scales (depth / 32, rows) as vLLM orders them for MXFP4."""
    order = [row + 8 * eighth for row in range(8) for eighth in range(8)]
    ordered = scales.reshape(-1, 64)[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]]
    return ordered.reshape(scales.shape)


def divided(n_tiles: int, n_steps: int, programs: int) -> list[list[range]]:
    """The ranges of steps of each tile, in the order in which Marlin adds their sums: every program
    computes as many steps as another, those of the divided tiles one after the other."""
    n = n_tiles
    if n_tiles > programs:
        n = n_tiles % programs
        n += programs if 3 * n <= programs else 0
    longest = -(-n * n_steps // programs)
    ends = {*range(0, n * n_steps, n_steps), *range(0, n * n_steps, longest), n * n_steps}
    cuts = sorted(ends)
    last: list[list[range]] = [[] for _ in range(n)]
    for begin, end in pairwise(cuts):
        tile = begin // n_steps
        last[tile].insert(0, range(begin - tile * n_steps, end - tile * n_steps))
    return [[range(n_steps)]] * (n_tiles - n) + last


def check_last_tiles(n_blocks: int) -> None:
    """Sums that depend on their order: each has products of very different sizes."""
    from unittest import mock

    from workers.vllm.kernels import marlin
    from workers.vllm.kernels.experts import Rows
    from workers.vllm.kernels.marlin import Opening

    torch.manual_seed(0)
    depth, columns, wide, programs, n_experts = 320, 256, 64, 3, 2
    n, n_steps = n_blocks * 64 - 5, depth // 64
    values = torch.zeros(n, depth)
    values[:, ::32] = torch.randn(n, depth // 32) * 10.0 ** torch.randint(0, 8, (depth // 32,))
    codes = torch.randint(0, 16, (n_experts, columns, depth))
    exponents = torch.randint(100, 140, (n_experts, columns, depth // 32), dtype=torch.uint8)
    weights = torch.tensor([*E2M1, *(-one for one in E2M1)])[codes].view(n_experts, columns, -1, 32)
    weights = (weights * (exponents.float() - 127).exp2()[..., None]).view(codes.shape)
    words = torch.stack([marlin_words(one.T) for one in codes])
    scales = torch.stack([marlin_scales(one.T) for one in exponents])
    packed = words, scales.view(torch.float8_e8m0fnu)
    ids = torch.cat([torch.arange(n), torch.full((5 + 64,), n)]).int()
    experts = torch.tensor([0] + [1] * n_blocks, dtype=torch.int32)
    rows = Rows(ids, experts, torch.tensor([n_blocks * 64], dtype=torch.int32))
    place = marlin.places(rows, n)
    assert place.tolist() == [*range(n)]
    share = torch.rand(n)
    expected = torch.zeros(n, columns)
    for number, ranges in enumerate(divided(n_blocks * columns // wide, n_steps, programs)):
        block, column = divmod(number, columns // wide)
        here = slice(block * 64, min(n, block * 64 + 64))
        across = slice(column * wide, column * wide + wide)
        own = weights[experts[block], across]
        for steps in ranges:
            even, odd = (torch.zeros(here.stop - here.start, wide) for _ in range(2))
            for at in (64 * step for step in steps):
                even += values[here, at : at + 32] @ own[:, at : at + 32].T
                odd += values[here, at + 32 : at + 64] @ own[:, at + 32 : at + 64].T
            expected[here, across] = (even + odd) + expected[here, across]
    division = marlin.Division(wide, 1)
    gpu = mock.Mock(multi_processor_count=programs)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu):
        plain = torch.full((n, columns), torch.nan)
        marlin.last_tiles_(plain, values, *packed, share, rows, place, division)
        gates, up = expected.chunk(2, -1)
        opened = torch.full((n, columns // 2), torch.nan)
        marlin.last_tiles_(opened, values, *packed, share, rows, place, division, Opening(1, 0.0))
    is_last = ~plain.isnan()
    assert is_last[-1].all()
    assert torch.equal(plain[is_last], (expected * share[:, None])[is_last])
    is_last = ~opened.isnan()
    assert is_last[-1].all()
    of_gates = gates / (1 + (-gates).exp()) * up
    torch.testing.assert_close(opened[is_last], of_gates[is_last], rtol=1e-5, atol=0)


@pytest.mark.xdist_group("interpreted")
@pytest.mark.parametrize("n_blocks", [1, 2, 5])
def test_divided_tiles_are_summed_in_marlins_order(n_blocks: int) -> None:
    run_interpreted(__name__, f"check_last_tiles({n_blocks})")


@needs_vllm
@pytest.mark.xdist_group("engines")  # whose process has loaded vLLM
def test_scales_are_in_vllms_order() -> None:
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

    scales = torch.randint(100, 140, (DEPTH // 32, ROWS), dtype=torch.uint8)
    numbers = scales.view(torch.float8_e8m0fnu).bfloat16()
    found = marlin_utils_fp4.mxfp4_marlin_process_scales(
        marlin_utils.marlin_permute_scales(numbers, DEPTH, ROWS, 32)
    )
    assert torch.equal(found.view(torch.uint8), marlin_scales(scales))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_words_are_in_vllms_order() -> None:
    from vllm import _custom_ops

    codes = torch.randint(0, 16, (ROWS, DEPTH))
    packed = (codes.view(ROWS, -1, 8) << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int().T.contiguous().cuda()
    repack = _custom_ops.gptq_marlin_repack
    given = {"b_q_weight": packed, "size_k": DEPTH, "size_n": ROWS, "num_bits": 4}
    if "perm" in signature(repack).parameters:
        given["perm"] = torch.empty(0, dtype=torch.int32, device="cuda")
    found = repack(**given)
    assert torch.equal(found.cpu(), marlin_words(codes.T))
