"""Attention's outputs are turned back and quantised: as by plain torch, with Triton's interpreter,
and on a GPU with the bits of vLLM's operation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.interpreted import run_interpreted

pytestmark = pytest.mark.xdist_group("interpreted")

GROUP, MOST = 128, 448.0
NAME = "vllm::fused_inv_rope_fp8_quant_kernel"


def plainly(x: Tensor, positions: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers yet to be rounded (tokens, heads, head), and scales (tokens, heads, groups)."""
    n = angles.shape[1]
    number = x.float()
    even, odd = number[..., -n::2].clone(), number[..., -n + 1 :: 2].clone()
    cos, sin = (one[:, None] for one in angles[positions].chunk(2, -1))
    number[..., -n::2] = even * cos + odd * sin
    number[..., -n + 1 :: 2] = odd * cos - even * sin
    groups = number.unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1).clamp(min=1e-10) / MOST).log2().ceil().exp2()
    return (groups / scales[..., None]).clamp(-MOST, MOST).flatten(-2), scales


def check(n: int, groups: int, heads: int, head: int, turned: int) -> None:
    """`heads`: of a group. They lie in wider rows, as attention pads them. Numbers come as float32:
    the interpreter rounds to 8 bits otherwise than devices."""
    from workers.vllm.kernels.inverse_rotary import can_unrotate, unrotate_and_quantise_

    torch.manual_seed(n)
    x = torch.randn(n, groups * heads + 4, head).bfloat16()[:, : groups * heads]
    x[0] *= 100
    x[-1, 0] = 0.0
    angles = torch.randn(50, turned)
    positions = torch.randint(50, (n,))
    assert can_unrotate(x, positions, angles, heads)
    assert not can_unrotate(x.float(), positions, angles, heads)
    assert not can_unrotate(x[:, :3], positions, angles, 3)
    assert not can_unrotate(x, positions, angles.bfloat16(), heads)
    padded, n_scales = -(-n // 4) * 4, heads * head // GROUP
    out, scales = torch.zeros(groups, n, heads * head), torch.full((groups, n_scales, padded), -1.0)
    unrotate_and_quantise_(out, scales[..., :n].transpose(1, 2), x, positions, angles)
    numbers, expected = plainly(x, positions, angles)
    assert torch.equal(out, numbers.view(n, groups, -1).transpose(0, 1))
    assert torch.equal(scales[..., :n], expected.view(n, groups, -1).permute(1, 2, 0))
    assert not scales[..., n:].any()


@pytest.mark.parametrize("case", [(7, 2, 4, 256, 64), (4, 1, 8, 128, 128), (1, 3, 4, 512, 64)])
def test_heads_are_turned_back_and_quantised(case: tuple[int, ...]) -> None:
    run_interpreted("tests.unit.workers.vllm.kernels.test_inverse_rotary", f"check(*{case})")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("n", [1, 130, 4099])
@pytest.mark.parametrize("groups", [4, 8])
def test_the_bits_are_those_of_vllms_operation(n: int, groups: int) -> None:
    from workers.vllm.kernels.quick_operations import OPERATIONS, all_sizes
    from workers.vllm.release import custom_ops

    # Which registers it.
    pytest.importorskip("vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant")
    own: Any = custom_ops.operation(NAME)
    generator = torch.Generator("cuda").manual_seed(n)
    heads, head, turned = 8, 512, 64
    normal = torch.randn(n, groups * heads, head, generator=generator, device="cuda").bfloat16()
    angles = torch.randn(2048, turned, generator=generator, device="cuda")
    positions = torch.randint(2048, (n,), generator=generator, device="cuda")
    newer = (True,) if len(custom_ops.argument_names(own)) > 15 else ()
    still = head - turned if newer else (head - turned) % GROUP
    rest = (GROUP, head // GROUP, still, turned // 2, False, MOST)
    sizes = (-(-n // 4) * 4, n, groups, heads * head, heads * head // GROUP, *newer)
    for x in (normal, all_sizes(n, groups * heads * head, normal).view_as(normal)):
        call = OPERATIONS[NAME].read(x, positions, angles, heads, *rest, *sizes)
        assert call is not None
        assert all(map(torch.equal, call.bits(call.by_vllm(own)), call.bits(call.by_kernel())))
