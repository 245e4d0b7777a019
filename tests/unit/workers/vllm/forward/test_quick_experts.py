"""Experts compute with the tile that is faster and has the same bits, for one slice."""

from typing import Any

import pytest
import torch
from torch import Tensor

from poc_core import fused
from tests.harness.marks import needs_vllm

pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]  # whose process has loaded vLLM

X = torch.zeros(8, 128).to(torch.float8_e4m3fn)
SLOW, OTHER, FAST = {"tile": 0}, {"tile": 1}, {"tile": 2}


class Experts:
    """As vLLM's: computes with the tile that is bound now."""

    block_shape = [128, 128]  # noqa: RUF012  # as vLLM's
    used: list[int] = []  # noqa: RUF012

    def apply(self, *, output: Tensor, hidden_states: Tensor, w1: Tensor) -> None:
        from vllm.model_executor.layers.fused_moe import get_config

        tile = (get_config() or {"tile": -1})["tile"]
        self.used.append(tile)
        output.fill_(1.0 if tile == OTHER["tile"] else 2.0)


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Experts:
    from workers.vllm import compat
    from workers.vllm.forward import quick_experts

    def taken(compute: Any) -> float:
        compute()
        return {-1: 10.0, 0: 11.0, 1: 1.0, 2: 5.0}[Experts.used[-1]]

    Experts.used = []
    monkeypatch.setattr(compat, "triton_experts", lambda: Experts)
    monkeypatch.setattr(quick_experts, "milliseconds", taken)
    monkeypatch.setattr(quick_experts, "TILES", (SLOW, OTHER, FAST))
    monkeypatch.setattr(quick_experts, "LEAST", len(X))
    monkeypatch.setattr(fused, "is_on", lambda _device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Experts()


def applied(quick: Any, experts: Experts, x: Tensor = X) -> int:
    """The tile of a slice's last call."""
    output = torch.zeros(len(x))
    with quick.bound():
        experts.apply(output=output, hidden_states=x, w1=torch.zeros(1))
    assert output.eq(2.0).all()
    return Experts.used[-1]


def test_the_fastest_tile_with_the_same_bits_computes_in_slices(experts: Experts) -> None:
    from workers.vllm.forward.quick_experts import QuickExperts

    quick = QuickExperts()
    assert applied(quick, experts) == FAST["tile"]
    Experts.used.clear()
    assert applied(quick, experts) == FAST["tile"]
    assert len(Experts.used) == 1
    experts.apply(output=torch.zeros(1), hidden_states=X, w1=torch.zeros(1))
    assert Experts.used[-1] == -1  # chat's


def test_few_tokens_keep_vllms_tile(experts: Experts) -> None:
    from workers.vllm.forward.quick_experts import QuickExperts

    assert applied(QuickExperts(), experts, X[:7]) == -1
    assert Experts.used == [-1]


def test_where_no_tile_can_be_tried_vllms_stays(
    experts: Experts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from workers.vllm.forward import quick_experts

    def fails(_compute: Any) -> float:
        raise RuntimeError("no memory")

    monkeypatch.setattr(quick_experts, "milliseconds", fails)
    assert applied(quick_experts.QuickExperts(), experts) == -1
    assert "no memory" in caplog.text
