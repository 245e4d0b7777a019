"""The kernels for experts in block FP8 compute what plain torch does, by Triton's interpreter,
which wants a process that has it from the beginning, and rounds to 8 and 16 bits otherwise than
devices: so numbers are float32 here. On a GPU their bits are held against vLLM's by a trial."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.harness.interpreted import run_interpreted

pytestmark = pytest.mark.xdist_group("interpreted")

TOKENS, EXPERTS, A_TOKEN, DEPTH, MIDDLE, GROUP = 24, 4, 2, 256, 128, 128


def plain(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    """Numbers times the scales of their blocks."""
    return numbers * scales.repeat_interleave(block, -2).repeat_interleave(GROUP, -1)


def check(a_block: int, wide: bool, powers: bool, limit: float) -> None:
    """Runs where Triton is its interpreter."""
    from tests.unit.workers.vllm.kernels.test_experts import rows_of
    from workers.vllm.kernels import block_experts as kernels
    from workers.vllm.kernels import quantise

    vars(quantise)["libdevice"] = SimpleNamespace(exp=lambda x: x.exp(), rcp_rn=lambda x: 1.0 / x)
    torch.manual_seed(0)

    def quantised(*shape: int, block: int = GROUP) -> kernels.Quantised:
        *rest, rows, columns = shape
        scales = torch.rand(*rest, rows // block, columns // GROUP) + 0.5
        return kernels.Quantised(torch.randn(shape), scales)

    x = quantised(TOKENS, DEPTH, block=1)
    first = quantised(EXPERTS, 2 * MIDDLE, DEPTH)
    second = quantised(EXPERTS, DEPTH, MIDDLE)
    share, chosen = torch.rand(TOKENS, EXPERTS).topk(A_TOKEN, dim=-1)
    by_row, n = chosen.flatten(), chosen.numel()
    rows = rows_of(chosen, EXPERTS, a_block)
    tile = kernels.Tile(a_block, wide, 2, 4, 2)
    n_by_expert = kernels.rows_by_expert(rows, tile.rows)
    opened = kernels.Quantised(
        torch.empty(n_by_expert, MIDDLE), torch.empty(MIDDLE // GROUP, n_by_expert).t()
    )
    out = torch.full((n, DEPTH), torch.nan)
    kernels.open_gates_(opened, x, first, rows, A_TOKEN, tile, kernels.Gates(powers, limit))
    kernels.multiply_(out, opened, second, share.flatten(), rows, tile)

    given = plain(*x, 1).repeat_interleave(A_TOKEN, 0)
    sums = torch.einsum("rk,rck->rc", given, plain(*first, GROUP)[by_row])
    gate, up = sums.chunk(2, dim=-1)
    if limit:
        assert gate.max() > limit < up.abs().max()
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = gate / (1 + (-gate).exp()) * up
    ids = rows.ids[: int(rows.n)].long()
    found = plain(*opened, 1)[: len(ids)][ids < n]
    # The kernel rounds its sums to bfloat16.
    torch.testing.assert_close(found, expected[ids[ids < n]], rtol=0.02, atol=2.0)
    most = opened.numbers[: len(ids)].abs().amax(-1)
    if powers:
        exponents = opened.scales[: len(ids)].log2()
        assert torch.equal(exponents, exponents.round())
        assert most.min() > 223  # a half of what there is room for
        assert most.max() <= 448
    else:
        torch.testing.assert_close(most, torch.full([len(ids)], 448.0))

    by_row_opened = torch.empty(n, MIDDLE)
    by_row_opened[ids[ids < n]] = found
    expected = torch.einsum("rk,rck->rc", by_row_opened, plain(*second, GROUP)[by_row])
    expected *= share.flatten()[:, None]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=0.5)


@pytest.mark.parametrize(
    ("wide", "powers", "limit"),
    [(False, False, 0.0), (True, False, 0.0), (True, True, 0.0), (False, True, 10.0)],
)
def test_the_products_are_those_of_plain_torch(wide: bool, powers: bool, limit: float) -> None:
    run_interpreted(__name__, f"check(16, {wide}, {powers}, {limit})")
