"""Kernels stand in for vLLM's products of experts where they have its bits and take less time."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from poc_core.arithmetic import fused
from tests.harness.marks import needs_vllm

pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]  # whose process has loaded vLLM

TOKENS, DEPTH, COLUMNS, EXPERTS, A_TOKEN = 128, 64, 32, 3, 2
CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16}


def product(x: Tensor, weights: Tensor, share: Tensor | None, a_token: int) -> Tensor:
    """All rows by the first expert's weights: which one is not what is tested here."""
    found = x.repeat_interleave(a_token, 0).float() @ weights[0].float().T
    return found if share is None else found * share[:, None]


def open_gates(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int


class Layer:
    """vLLM's module of experts as the hooks find it, and the kernel; who computed what."""

    def __init__(self) -> None:
        self.by: list[str] = []
        self.has_tma = False
        self.kernel_adds = self.by_expert_adds = 0.0
        self.module: Any = ModuleType("triton_moe")
        layer = self

        def invoke(
            x: Any, weights: Any, out: Any, _xs: Any, _ws: Any, share: Any, ids: Any, *rest: Any,
            **_named: Any,
        ) -> None:  # fmt: skip
            layer.by.append("own product")
            shares, a_token = rest[2:4]
            found = product(x, weights, share.flatten() if shares else None, a_token)
            out.copy_(found.view_as(out))

        class TritonExperts:
            quant_config = SimpleNamespace(gemm1_clamp_limit=None)
            _lora_context = None

            def activation(self, _kind: Any, output: Tensor, given: Tensor) -> None:
                layer.by.append("own gates")
                output.copy_(open_gates(given))

            def apply(
                self, x: Tensor, w1: Tensor, w2: Tensor, share: Tensor, kind: str, *,
                workspace13: Tensor, expert_map: object = None,
            ) -> Tensor:  # fmt: skip
                ids = torch.zeros(1, dtype=torch.int32), *torch.zeros(2, 1, dtype=torch.int32)
                first = x.new_empty(len(x), A_TOKEN, w1.shape[1])
                opened = workspace13.view(-1)[: len(x) * A_TOKEN * w1.shape[1] // 2]
                opened = opened.view(len(x) * A_TOKEN, w1.shape[1] // 2)
                second = x.new_empty(len(x), A_TOKEN, w2.shape[1])
                run: Any = layer.module.invoke_fused_moe_triton_kernel
                run(x, w1, first, None, None, None, *ids, False, A_TOKEN, CONFIG, B_bias=None)
                self.activation(kind, opened, first.view(-1, w1.shape[1]))
                run(opened, w2, second, None, None, share, *ids, True, 1, CONFIG, B_bias=None)
                return second.sum(1)

        vars(self.module).update(TritonExperts=TritonExperts, invoke_fused_moe_triton_kernel=invoke)
        torch.manual_seed(0)
        self.x = torch.randn(TOKENS, DEPTH).bfloat16()
        self.w1 = torch.randn(EXPERTS, 2 * COLUMNS, DEPTH).bfloat16()
        self.w2 = torch.randn(EXPERTS, DEPTH, COLUMNS).bfloat16()
        self.share = torch.rand(TOKENS, A_TOKEN)

    def kernel(
        self, out: Tensor, x: Tensor, weights: Tensor, share: Any, _rows: Any, a_token: int,
        _tile: Any, by_expert: bool,
    ) -> None:  # fmt: skip
        opens = 2 * out.shape[1] == weights.shape[1]
        self.by.append(f"kernel{' opens' * opens}{' by expert' * by_expert}")
        found = product(x, weights, share, a_token)
        found = open_gates(found.bfloat16()) if opens else found
        if by_expert:  # from the last row to the first, and a row that nothing asks for
            found = torch.cat([found.flip(0), torch.full_like(found[:1], torch.nan)])
        out.copy_(found + self.kernel_adds)

    def kernel_by_expert(
        self, out: Tensor, x: Tensor, weights: Tensor, share: Tensor, _rows: Any, _tile: Any
    ) -> None:
        self.by.append("kernel takes by expert")
        out.copy_(product(x[:-1].flip(0), weights, share, 1) + self.by_expert_adds)

    def compute(
        self, kind: str = "silu", rows: int = TOKENS, room: int = 1, expert_map: object = None
    ) -> tuple[Tensor, list[str]]:
        """The experts' answer, and who computed. `room`: for so many rows more than needed."""
        self.by.clear()
        experts: Any = self.module.TritonExperts()
        space = self.x.new_empty(rows * A_TOKEN + room, COLUMNS)
        x, share = self.x[:rows], self.share[:rows]
        named = {"workspace13": space, "expert_map": expert_map}
        return experts.apply(x, self.w1, self.w2, share, kind, **named), self.by


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    from workers.vllm.kernels import quick_experts as quick  # here: it imports vLLM
    from workers.vllm.kernels import trial
    from workers.vllm.release import custom_ops

    found = Layer()
    monkeypatch.setattr(custom_ops, "triton_experts", lambda: found.module)
    kernels = ModuleType("workers.vllm.kernels.experts")
    vars(kernels).update(
        product_=found.kernel, can_multiply=lambda *_: True, Rows=lambda *_: (), Tile=Tile,
        product_by_expert_=found.kernel_by_expert, can_multiply_by_expert=lambda *_: found.has_tma,
        rows_by_expert=lambda *_: TOKENS * A_TOKEN + 1,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "workers.vllm.kernels.experts", kernels)
    monkeypatch.setattr(fused, "is_on", lambda _device: True)
    monkeypatch.setattr(quick, "LEAST", TOKENS * DEPTH // 4)
    times = iter(range(1000, 0, -1))  # each way that is timed takes less than the one before
    monkeypatch.setattr(trial, "milliseconds", lambda _compute: float(next(times)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def quick_experts() -> Any:
    from workers.vllm.kernels.quick_experts import QuickExperts

    return QuickExperts()


OURS, OWN = ["kernel opens", "kernel"], ["own product", "own gates", "own product"]
BY_EXPERT = ["kernel opens by expert", "kernel takes by expert"]


def test_the_kernels_compute_what_vllm_does_after_one_trial(layer: Layer) -> None:
    expected, by = layer.compute()
    assert by == OWN
    quick = quick_experts()
    with quick.bound():
        found, by = layer.compute()
        assert torch.equal(found, expected)
        assert by == [*OWN[:2], *OURS[:1] * 2, *OWN[2:], *OURS[1:] * 2]
        again, by = layer.compute()
        assert torch.equal(again, expected)
        assert by == OURS
    assert layer.compute()[1] == OWN, "chat keeps vLLM's own"


@pytest.mark.parametrize("fault", ["other bits", "slower", "fails"])
def test_a_kernel_that_is_no_better_is_not_used(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    expected, _ = layer.compute()
    if fault == "other bits":
        layer.kernel_adds = 1.0
    elif fault == "slower":
        monkeypatch.setattr("workers.vllm.kernels.trial.milliseconds", lambda _one: 1.0)
    else:
        monkeypatch.setattr(
            sys.modules["workers.vllm.kernels.experts"], "product_", lambda *_args: 1 / 0
        )
    with quick_experts().bound():
        for _ in range(2):
            found, by = layer.compute()
            assert torch.equal(found, expected)
    assert by == OWN


def test_what_the_kernels_do_not_know_is_vllms(layer: Layer) -> None:
    with quick_experts().bound():
        layer.compute()
        assert layer.compute()[1] == OURS
        assert layer.compute(kind="gelu")[1] == ["own product", "own gates", "kernel"]
        assert layer.compute(rows=8)[1] == OWN  # few: chat's steps are no larger
        experts: Any = layer.module.TritonExperts
        experts.quant_config = SimpleNamespace(gemm1_clamp_limit=7.0)
        assert layer.compute()[1] == ["own product", "own gates", "kernel"]
        # An adapter's sums are added to the first product.
        experts._lora_context = object()  # noqa: SLF001 - vLLM's own name
        assert layer.compute()[1] == OWN


def test_a_second_product_takes_the_first_one_by_expert_after_one_trial(layer: Layer) -> None:
    expected, _ = layer.compute()
    layer.has_tma = True
    with quick_experts().bound():
        for by_then in (None, BY_EXPERT):
            found, by = layer.compute()
            assert torch.equal(found, expected)
            assert by_then is None or by == by_then
        assert layer.compute(room=0)[1] == OURS, "vLLM's memory has no room for whole blocks"
        assert layer.compute(expert_map=[0])[1] == OURS, "other ranks' experts have no weights"
        layer.has_tma = False
        found, by = layer.compute()
        assert torch.equal(found, expected)
        assert by == [BY_EXPERT[0], *OWN[:2], OURS[1]], "what lies by expert is made again"


@pytest.mark.parametrize("fault", ["other bits", "slower", "fails"])
def test_products_by_expert_that_are_no_better_are_not_used(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    expected, _ = layer.compute()
    layer.has_tma = True
    if fault == "other bits":
        layer.by_expert_adds = 1.0
    elif fault == "slower":
        times = iter([2.0, 1.0, 2.0, 1.0, 1.0, 1.0])  # of each product alone, of both
        quick = "workers.vllm.kernels.trial.milliseconds"
        monkeypatch.setattr(quick, lambda _compute: next(times))
    else:
        kernels = sys.modules["workers.vllm.kernels.experts"]
        monkeypatch.setattr(kernels, "product_by_expert_", lambda *_args: 1 / 0)
    with quick_experts().bound():
        for _ in range(2):
            found, by = layer.compute()
            assert torch.equal(found, expected)
    assert by == OURS
