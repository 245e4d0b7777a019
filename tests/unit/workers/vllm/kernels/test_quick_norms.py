"""Fused kernels stand in for MiniMax's norms of queries and keys where their bits are the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from poc_core.arithmetic import fused
from tests.harness.marks import needs_vllm

pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]  # whose process has loaded vLLM

EPS = 1e-6


def norm(columns: int, device: str = "cpu") -> SimpleNamespace:
    """What `forward_qk` reads of a norm."""
    weight = torch.randn(columns, generator=torch.Generator().manual_seed(columns))
    return SimpleNamespace(weight=weight.bfloat16().to(device), variance_epsilon=EPS)


def rows(n: int, columns: int, device: str = "cpu") -> Tensor:
    """Rows of all sizes, a part of wider ones, as queries are of the projections' results."""
    wide = torch.randn(n, columns + 64, generator=torch.Generator().manual_seed(n))
    wide *= torch.linspace(-50, 50, n).exp2()[:, None]
    wide[n // 2] = 0.0
    return wide.bfloat16().to(device)[:, :columns]


class Kernels:
    """In the kernels' place: vLLM's own, and what `more` adds to queries."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.__name__ = "kernels"
        self.more = 0.0
        self.rows: list[int] = []

    def __call__(self, q_norm: Any, k_norm: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        self.rows.append(len(q))
        queries, keys = self._own(q_norm, k_norm, q, k)
        return queries + self.more, keys


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    from workers.vllm.kernels import quick_norms
    from workers.vllm.release import custom_ops

    norms: Any = custom_ops.query_and_key_norms()
    found = Kernels(norms.forward_qk)
    monkeypatch.setattr(quick_norms, "in_one_pass", found)
    monkeypatch.setattr(quick_norms, "LEAST", 8 * 128)
    monkeypatch.setattr(fused, "is_on", lambda _device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def normed(quick: Any, n: int = 8) -> tuple[Tensor, Tensor]:
    """As vLLM's model asks."""
    from workers.vllm.release import custom_ops

    norms: Any = custom_ops.query_and_key_norms()
    with quick.bound():
        found: tuple[Tensor, Tensor] = norms.forward_qk(
            norm(128), norm(64), rows(n, 128), rows(n, 64)
        )
    return found


def test_kernels_compute_after_a_trial_and_vllms_own_outside(kernels: Kernels) -> None:
    from workers.vllm.kernels.quick_norms import QuickNorms
    from workers.vllm.release import custom_ops

    quick, norms = QuickNorms(), custom_ops.query_and_key_norms()
    own = norms.forward_qk  # type: ignore[union-attr]
    expected = own(norm(128), norm(64), rows(8, 128), rows(8, 64))
    for _ in range(2):
        assert all(map(torch.equal, normed(quick), expected))
    normed(quick, n=7)  # too few
    assert kernels.rows == [8, 8, 8]
    assert norms.forward_qk is own  # type: ignore[union-attr]


def test_where_bits_differ_vllms_own_stays(
    kernels: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    from workers.vllm.kernels.quick_norms import QuickNorms

    quick, kernels.more = QuickNorms(), 1.0
    first, second = normed(quick), normed(quick)
    assert kernels.rows == [8]
    assert all(map(torch.equal, first, second))
    assert "gives other bits" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 31, 512, 32768])
@pytest.mark.parametrize("columns", [(6144, 1024), (3072, 512), (4096, 132), (128, 128), (8192, 1)])
def test_kernels_give_the_bits_of_vllms_norms(columns: tuple[int, int], n: int) -> None:
    from workers.vllm.kernels import quick_norms
    from workers.vllm.kernels.norms import can_norm
    from workers.vllm.release import custom_ops

    norms: Any = custom_ops.query_and_key_norms()
    args: list[Any] = [norm(one, "cuda") for one in columns]
    args += [rows(n, one, "cuda") for one in columns]
    if not all(map(can_norm, args[2:])):
        with pytest.raises(ValueError, match="rows of"):
            quick_norms.in_one_pass(*args)
        return
    theirs, ours = norms.forward_qk(*args), quick_norms.in_one_pass(*args)
    assert all(map(torch.equal, theirs, ours))
    assert all(one.is_contiguous() for one in ours)


def test_where_the_kernels_cannot_be_used_vllms_own_stays(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from workers.vllm.kernels import quick_norms

    def of_no_rows(*_args: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("no such rows")

    monkeypatch.setattr(quick_norms, "in_one_pass", of_no_rows)
    quick = quick_norms.QuickNorms()
    first, second = normed(quick), normed(quick)
    assert all(map(torch.equal, first, second))
    assert "cannot be used: no such rows" in caplog.text
