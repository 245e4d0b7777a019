"""The kernel for products of experts computes what plain torch does, by Triton's interpreter, which
wants a process that has it from the beginning and multiplies float32 alone. On a GPU its bits are
held against vLLM's kernel by a trial at the first large call (workers/vllm/kernels)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.interpreted import run_interpreted

pytestmark = pytest.mark.xdist_group("interpreted")

TOKENS, EXPERTS, A_TOKEN, DEPTH, COLUMNS = 24, 5, 2, 32, 64
ELSEWHERE = 3  # another rank's expert
BLOCK = 16


def uneven_choice(tokens: int, n_experts: int, a_token: int) -> Tensor:
    """Each token's experts: some experts have no rows, the first ones many."""
    torch.manual_seed(tokens)
    scores = torch.rand(tokens, n_experts) + torch.linspace(1, 0, n_experts)
    return scores.topk(a_token).indices


def rows_of(chosen: Tensor, n_experts: int, block: int, elsewhere: int | None = None) -> Any:
    """Rows by expert in whole blocks, as vLLM's moe_align_block_size orders them. `elsewhere`:
    another rank's expert."""
    from workers.vllm.kernels.experts import Rows

    ids, experts = [], []
    for expert in range(n_experts):
        rows = (chosen.flatten() == expert).nonzero().flatten().tolist()
        rows += [chosen.numel()] * (-len(rows) % block)
        ids += rows
        experts += [-1 if expert == elsewhere else expert] * (len(rows) // block)
    n = len(ids)
    spare = [chosen.numel()] * (2 * block)  # which nobody computes
    lists = (ids + spare, [*experts, 0, 0], [n])
    return Rows(*(torch.tensor(one, dtype=torch.int32) for one in lists))


def check(opens: bool) -> None:
    """Runs where Triton is its interpreter."""
    from workers.vllm.kernels.experts import Tile, can_multiply, product_

    torch.manual_seed(0)
    x, weights = torch.randn(TOKENS, DEPTH), torch.randn(EXPERTS, COLUMNS, DEPTH)
    share, chosen = torch.rand(TOKENS, EXPERTS).topk(A_TOKEN, dim=-1)
    tile = Tile(BLOCK, 32, 16, 2, 4, 2)
    assert can_multiply(x.half(), weights.half(), tile)
    assert not can_multiply(x, weights, tile)
    assert not can_multiply(x.half(), weights[:, :40].half(), tile)
    out = torch.full((TOKENS * A_TOKEN, COLUMNS // 2 if opens else COLUMNS), float("nan"))
    rows = rows_of(chosen, EXPERTS, BLOCK, ELSEWHERE)
    product_(out, x, weights, None if opens else share.flatten(), rows, A_TOKEN, tile)
    by_row = chosen.flatten()
    expected = torch.einsum("rk,rck->rc", x.repeat_interleave(A_TOKEN, 0), weights[by_row])
    if opens:
        gate, up = expected.chunk(2, dim=-1)
        expected = gate / (1 + (-gate).exp()) * up
    else:
        expected *= share.flatten()[:, None]
    expected[by_row == ELSEWHERE] = 0.0
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def check_by_expert() -> None:
    """A first product written by expert, and the second one of it: as of rows by token."""
    from unittest import mock

    from workers.vllm.kernels import experts as kernels

    torch.manual_seed(0)
    x, first = torch.randn(TOKENS, DEPTH), torch.randn(EXPERTS, COLUMNS, DEPTH)
    second = torch.randn(EXPERTS, DEPTH, COLUMNS // 2)
    share, chosen = torch.rand(TOKENS, EXPERTS - 2).topk(A_TOKEN, dim=-1)  # none of ELSEWHERE
    tile = kernels.Tile(BLOCK, 32, 16, 2, 4, 2)
    rows = rows_of(chosen, EXPERTS, BLOCK, ELSEWHERE)
    n, shares = TOKENS * A_TOKEN, share.flatten()
    by_row, by_expert = (
        torch.empty(n, COLUMNS // 2),
        torch.empty(kernels.rows_by_expert(rows, tile.rows), COLUMNS // 2),
    )
    kernels.product_(by_row, x, first, None, rows, A_TOKEN, tile)
    kernels.product_(by_expert, x, first, None, rows, A_TOKEN, tile, by_expert=True)
    ids = rows.ids[: int(rows.n)].long()
    assert torch.equal(by_expert[: len(ids)][ids < n], by_row[ids[ids < n]])

    expected, found = (torch.full((n, DEPTH), torch.nan) for _ in range(2))
    kernels.product_(expected, by_row, second, shares, rows, 1, tile)
    gpu = mock.Mock(multi_processor_count=3)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu):
        kernels.product_by_expert_(found, by_expert, second, shares, rows, tile)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", ["check(True)", "check(False)", "check_by_expert()"])
def test_products_of_experts_are_those_of_plain_torch(what: str) -> None:
    run_interpreted(__name__, what)
