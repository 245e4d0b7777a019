"""An expert's rows are put in order within its blocks, by Triton's interpreter and on a GPU."""

import pytest
import torch
from torch import Tensor

from tests.harness.interpreted import run_interpreted

pytestmark = pytest.mark.xdist_group("interpreted")


def mixed(rows: Tensor, experts: Tensor, n_used: int, block: int) -> Tensor:
    """The same rows in any order within each expert's blocks."""
    of_place = experts[: n_used // block].repeat_interleave(block)
    order = (of_place + torch.rand(n_used, dtype=torch.float64)).argsort()
    return torch.cat([rows[:n_used][order], rows[n_used:]])


def check(tokens: int, n_experts: int, a_token: int, block: int, device: str = "cpu") -> None:
    from tests.unit.workers.vllm.kernels.test_experts import rows_of, uneven_choice
    from workers.vllm.kernels.row_order import in_order

    chosen = uneven_choice(tokens, n_experts, a_token)
    expected, experts, n_used = rows_of(chosen, n_experts, block)
    experts[-2:] = experts[-3]  # of blocks that do not count, whatever they say
    rows = mixed(expected, experts, int(n_used), block)
    assert len(rows) < 200 or not torch.equal(rows, expected)
    found = in_order(rows.to(device), experts.to(device), n_used.to(device), block)
    assert torch.equal(found.cpu(), expected)


CASES = [(1, 8, 2, 8), (40, 8, 2, 8), (300, 6, 3, 16), (300, 6, 3, 48), (200, 40, 6, 64)]


@pytest.mark.parametrize("case", CASES)
def test_rows_of_each_expert_come_in_order(case: tuple[int, ...]) -> None:
    run_interpreted("tests.unit.workers.vllm.kernels.test_row_order", f"check(*{case})")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", [*CASES, (32_768, 256, 6, 64), (32_768, 4, 4, 64)])
def test_rows_of_each_expert_come_in_order_on_a_gpu(case: tuple[int, int, int, int]) -> None:
    check(*case, device="cuda")
