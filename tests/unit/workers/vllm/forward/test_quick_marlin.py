"""Unpacked experts stand in for Marlin's where their result differs by the order of sums alone."""

from inspect import Parameter, Signature
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from poc_core import fused
from tests.harness.marks import needs_vllm

pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]  # whose process has loaded vLLM

TOKENS, COLUMNS, MIDDLE, EXPERTS, A_TOKEN = 16, 256, 256, 3, 2
NAMES = [
    *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
    *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
    *("expert_tokens_meta", "apply_router_weight_on_input"),
]


class Marlin:
    """vLLM's MarlinExperts as the hook finds them; `by`: who computed."""

    by: list[str]
    ways: list[tuple[int, int] | None]
    quant_config = SimpleNamespace(use_mxfp4_w4a16=True, gemm1_clamp_limit=7.0)
    activation_config = SimpleNamespace(alpha=1.0, beta=0.0)
    w1_bias = w2_bias = g1_alphas = g2_alphas = input_dtype = None
    w1_scale = torch.zeros(EXPERTS, COLUMNS // 32, 2 * MIDDLE, dtype=torch.uint8)
    w2_scale = torch.zeros(EXPERTS, MIDDLE // 32, COLUMNS, dtype=torch.uint8)

    def apply(self, **given: Any) -> None:
        self.by.append("own")
        given["output"].copy_(given["hidden_states"] * 2)

    def moe_sum(self, rows: Tensor, out: Tensor, chosen: Tensor, expert_map: None) -> None: ...


vars(Marlin.apply)["__signature__"] = Signature(
    [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *NAMES)]
)


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Marlin:
    from workers.vllm.forward import quick_marlin
    from workers.vllm.release import custom_ops

    marlin = Marlin()
    marlin.by, marlin.ways = [], []
    monkeypatch.setenv("POC_EXPERTS", "fast")
    monkeypatch.setattr(custom_ops, "marlin_experts", lambda: Marlin)
    monkeypatch.setattr(fused, "is_on", lambda device: True)
    monkeypatch.setattr(quick_marlin, "LEAST", TOKENS * A_TOKEN)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**34, 2**34))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    monkeypatch.setattr(quick_marlin, "compute", computed_by(marlin, 2.004))
    ms = cycle((1.0, 2.0))  # ours, Marlin's
    monkeypatch.setattr(quick_marlin, "milliseconds", lambda compute: next(ms))
    return marlin


def computed_by(marlin: Marlin, *factors: float) -> Any:
    """The results by each way, the last for all further ones."""
    left = [*factors]

    def compute(call: Any, unpacked: Tensor, way: Any) -> None:
        assert unpacked.numel() >= EXPERTS * 2 * MIDDLE * COLUMNS
        assert (call.limit, call.shapes[0]) == (7.0, (EXPERTS, 2 * MIDDLE, COLUMNS))
        assert call.shapes[1] == (EXPERTS, COLUMNS, MIDDLE)
        marlin.by.append("ours")
        marlin.ways.append(way.division)
        call.out.copy_(call.x * (left.pop(0) if len(left) > 1 else left[0]))

    return compute


def call(marlin: Marlin, quick: Any, n: int = 2, tokens: int = TOKENS, **other: Any) -> None:
    x = torch.randn(tokens, COLUMNS, dtype=torch.bfloat16)
    share, chosen = torch.rand(tokens, EXPERTS).topk(A_TOKEN)
    words = {
        "w1": torch.zeros(EXPERTS, COLUMNS // 16, 4 * MIDDLE, dtype=torch.int32),
        "w2": torch.zeros(EXPERTS, MIDDLE // 16, 2 * COLUMNS, dtype=torch.int32),
    }
    given: dict[str, Any] = dict.fromkeys(NAMES) | words
    given |= {"output": torch.empty_like(x), "hidden_states": x, "topk_weights": share}
    given |= {"topk_ids": chosen, "activation": SimpleNamespace(value="silu")}
    given |= {"workspace13": x, "workspace2": x, "apply_router_weight_on_input": False} | other
    with quick.bound():
        for _ in range(n):
            marlin.apply(**given)
    marlin.apply(**given)


def test_the_first_call_is_a_trial_and_chat_keeps_marlin(experts: Marlin) -> None:
    from workers.vllm.forward.quick_marlin import QuickMarlin

    call(experts, QuickMarlin())
    assert experts.by == ["own", "ours", "ours", "ours", "own"]


def test_a_result_that_lies_apart_is_not_used(
    experts: Marlin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from workers.vllm.forward import quick_marlin

    monkeypatch.setattr(quick_marlin, "compute", computed_by(experts, 2.1))
    call(experts, quick_marlin.QuickMarlin())
    assert experts.by == ["own", "ours", "own", "own", "own"]
    assert "apart" in caplog.text


def test_a_gpu_without_room_keeps_marlin(
    experts: Marlin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from workers.vllm.forward.quick_marlin import QuickMarlin

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**29, 2**34))
    call(experts, QuickMarlin())
    assert experts.by == ["own"] * 3
    assert "a smaller --gpu-memory-utilization" in caplog.text


@pytest.mark.parametrize(("free", "last"), [(2**29, "ours"), (2**34, "own")])
def test_shapes_outlive_a_larger_one_that_finds_no_memory(
    experts: Marlin, monkeypatch: pytest.MonkeyPatch, free: int, last: str
) -> None:
    from workers.vllm.forward import quick_marlin

    quick = quick_marlin.QuickMarlin()
    call(experts, quick)
    small = experts.w1_scale, experts.w2_scale
    experts.w1_scale, experts.w2_scale = (torch.cat([one] * 2) for one in small)
    larger = {
        "w1": torch.zeros(2 * EXPERTS, COLUMNS // 16, 4 * MIDDLE, dtype=torch.int32),
        "w2": torch.zeros(2 * EXPERTS, MIDDLE // 16, 2 * COLUMNS, dtype=torch.int32),
    }
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**34))
    with monkeypatch.context() as patch:  # the memory is free, but not in one piece
        patch.setattr(Tensor, "new_empty", refused)
        call(experts, quick, n=1, **larger)
    assert experts.by[-2:] == ["own", "own"]
    experts.w1_scale, experts.w2_scale = small
    call(experts, quick, n=1)
    assert experts.by[-2] == last


def refused(*args: Any) -> Tensor:
    raise torch.OutOfMemoryError("no piece of this size")


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": TOKENS - 1},
        {"expert_map": torch.zeros(EXPERTS)},
        {"apply_router_weight_on_input": True},
        {"activation": SimpleNamespace(value="gelu")},
        {"w1": torch.zeros(EXPERTS, COLUMNS // 16, 2 * MIDDLE, dtype=torch.int32)},
    ],
)
def test_what_the_kernels_do_not_compute_is_left_to_marlin(
    experts: Marlin, other: dict[str, Any]
) -> None:
    from workers.vllm.forward.quick_marlin import QuickMarlin

    call(experts, QuickMarlin(), **other)
    assert experts.by == ["own"] * 3


@pytest.mark.parametrize("said", ["same", None])
def test_the_same_sums_are_those_whose_bits_are_marlins(
    experts: Marlin, monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    from workers.vllm.forward import quick_marlin

    monkeypatch.delenv("POC_EXPERTS")
    if said:
        monkeypatch.setenv("POC_EXPERTS", said)
    monkeypatch.setattr(quick_marlin, "compute", computed_by(experts, 2.004, 2.0))
    call(experts, quick_marlin.QuickMarlin())
    assert experts.by == ["own", "ours", "ours", "ours", "ours", "own"]
    assert experts.ways == [(128, 2), (256, 1), (256, 1), (256, 1)]


@pytest.mark.parametrize(
    ("factor", "ms", "words"), [(2.004, 1.0, "apart from Marlin's"), (2.0, 3.0, "")]
)
def test_other_bits_and_slower_ones_are_left_to_marlin(
    experts: Marlin,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    factor: float,
    ms: float,
    words: str,
) -> None:
    from workers.vllm.forward import quick_marlin

    monkeypatch.setenv("POC_EXPERTS", "same")
    monkeypatch.setattr(quick_marlin, "compute", computed_by(experts, factor))
    times = cycle((ms, 2.0))
    monkeypatch.setattr(quick_marlin, "milliseconds", lambda compute: next(times))
    call(experts, quick_marlin.QuickMarlin())
    assert experts.by[-2:] == ["own", "own"]
    assert words in caplog.text


def test_exact_experts_are_marlins(experts: Marlin, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm.forward.quick_marlin import QuickMarlin

    monkeypatch.setenv("POC_EXPERTS", "exact")
    call(experts, QuickMarlin())
    assert experts.by == ["own"] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("tokens", "middle"), [(8192, 1024), (6144, 1024), (5000, 2048)])
def test_products_in_marlins_order_have_its_bits_on_a_gpu(tokens: int, middle: int) -> None:
    """DeepSeek-V4-Flash's sizes under tensor parallel 2 and whole, fewer experts."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    from workers.vllm.forward import quick_marlin
    from workers.vllm.forward.ordered_rows import MARLIN, OrderedRows
    from workers.vllm.release import custom_ops

    torch.manual_seed(0)
    hidden, n_experts, a_token = 4096, 32, 6
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    logits = torch.randn(tokens, n_experts, device="cuda")
    share, chosen = logits.softmax(-1).topk(a_token)
    weights, scales = [], []
    for columns, depth in ((2 * middle, hidden), (hidden, middle)):
        of_words = (n_experts, depth // 16, 2 * columns)
        weights.append(torch.randint(-(2**31), 2**31, of_words, dtype=torch.int32, device="cuda"))
        powers = torch.randint(117, 121, (n_experts, depth // 32, columns), device="cuda")
        scales.append(powers.to(torch.uint8).view(torch.float8_e8m0fnu))
    own = custom_ops.operation(MARLIN)
    ordered = OrderedRows(own, custom_ops.argument_names(own))
    kind = scalar_types.float4_e2m1f.id
    with custom_ops.in_place_of_operations({MARLIN: ordered}):
        # vLLM passes moe_sum too: torch.sum, the default, adds in another order
        expected = fused_marlin_moe(
            x, *weights, None, None, *scales, share, chosen.int(), quant_type_id=kind,
            moe_sum=lambda rows, out, *_: (_custom_ops.moe_sum(rows, out), out)[1],
        )  # fmt: skip
    assert expected.isfinite().all()
    out = torch.empty_like(x)
    spaces = torch.empty(0, device="cuda"), torch.empty(0, device="cuda")
    layer = quick_marlin.Call(
        out, x, (weights[0], weights[1]), (scales[0], scales[1]), share, chosen.int(), spaces,
        lambda rows: _custom_ops.moe_sum(rows, out), 0.0,
    )  # fmt: skip
    unpacked = x.new_empty(max(n * columns * depth for n, columns, depth in layer.shapes))
    differing = {}
    for way in quick_marlin.SAME_WAYS:
        out.fill_(float("nan"))
        quick_marlin.compute(layer, unpacked, way)
        differing[way.division] = int((out != expected).sum())
    assert 0 in differing.values(), differing
