"""An expert's rows are put in order within its blocks, by Triton's interpreter and on a GPU."""

import pytest
import torch
from torch import Tensor

from tests.unit.poc_core.arithmetic.interpreted import run_interpreted


def grouped(chosen: Tensor, n_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows by expert in whole blocks, as vLLM's operation gives them but in any order, what they
    are in order, the blocks' experts, and how many places count.
    """
    flat = chosen.flatten()
    mixed, ordered, experts = [], [], []
    for expert in range(n_experts):
        rows = (flat == expert).nonzero().flatten().int()
        padding = torch.full((-len(rows) % block,), len(flat), dtype=torch.int32)
        mixed.append(torch.cat([rows[torch.randperm(len(rows))], padding]))
        ordered.append(torch.cat([rows, padding]))
        experts += [expert] * (len(mixed[-1]) // block)
    tail = torch.arange(7, dtype=torch.int32)  # of which nothing is said
    n_used = sum(map(len, mixed))
    n_blocks = -(-(n_used + len(tail)) // block)
    experts += [experts[-1]] * (n_blocks - len(experts))
    return (
        torch.cat([*mixed, tail]),
        torch.cat([*ordered, tail]),
        torch.tensor(experts, dtype=torch.int32),
        torch.tensor([n_used], dtype=torch.int32),
    )


def check(tokens: int, n_experts: int, a_token: int, block: int, device: str = "cpu") -> None:
    from poc_core.fused.row_order import in_order

    torch.manual_seed(tokens)
    # Some experts have no rows, the first ones many.
    chosen = (torch.rand(tokens, n_experts) + torch.linspace(1, 0, n_experts)).topk(a_token).indices
    rows, expected, experts, n_used = (one.to(device) for one in grouped(chosen, n_experts, block))
    assert len(rows) < 200 or not torch.equal(rows, expected)
    assert torch.equal(in_order(rows, experts, n_used, block), expected)


CASES = [(1, 8, 2, 8), (40, 8, 2, 8), (300, 6, 3, 16), (300, 6, 3, 48), (200, 40, 6, 64)]


@pytest.mark.parametrize("case", CASES)
def test_rows_of_each_expert_come_in_order(case: tuple[int, ...]) -> None:
    run_interpreted("tests.unit.poc_core.arithmetic.test_row_order", f"check(*{case})")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", [*CASES, (32_768, 256, 6, 64), (32_768, 4, 4, 64)])
def test_rows_of_each_expert_come_in_order_on_a_gpu(case: tuple[int, int, int, int]) -> None:
    check(*case, device="cuda")
