"""Rows are sorted by expert as vLLM sorts them, by Triton's interpreter and on a GPU."""

import pytest
import torch

from tests.harness.interpreted import run_interpreted

pytestmark = pytest.mark.xdist_group("interpreted")


def check(
    tokens: int, n_experts: int, a_token: int, block: int, device: str = "cpu", dtype: str = "int32"
) -> None:
    from tests.unit.workers.vllm.kernels.test_experts import rows_of, uneven_choice
    from workers.vllm.kernels.sorted_rows import sorted_rows

    chosen = uneven_choice(tokens, n_experts, a_token)
    expected = rows_of(chosen, n_experts, block)
    n = int(expected.n)
    found = sorted_rows(chosen.to(device, getattr(torch, dtype)), block, n_experts)
    assert found.n.tolist() == [n]
    assert torch.equal(found.ids[:n].cpu(), expected.ids[:n])
    assert torch.equal(found.experts[: n // block].cpu(), expected.experts[: n // block])
    assert len(found.ids) % block == 0
    assert bool((found.ids[n:] == chosen.numel()).all())


# 256 rows a program: fewer, exactly one, several and a part; experts that are no power of two
CASES = [
    (1, 8, 2, 8), (128, 8, 2, 128), (300, 6, 3, 16), (300, 6, 3, 48), (200, 40, 6, 64), (7, 3, 1, 4)
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_sorted_by_expert(case: tuple[int, ...], dtype: str) -> None:
    call = f"check(*{case}, dtype={dtype!r})"
    run_interpreted("tests.unit.workers.vllm.kernels.test_sorted_rows", call)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", [*CASES, (32_768, 256, 8, 128), (28_672, 256, 6, 64)])
def test_rows_are_sorted_by_expert_on_a_gpu(case: tuple[int, int, int, int]) -> None:
    check(*case, device="cuda")
    check(*case, device="cuda", dtype="int64")
