"""The kernel for experts in 4 bits stands in for Marlin's where it has the same bits and takes less
time."""

from inspect import Parameter, Signature
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from poc_core.arithmetic import fused
from tests.harness.marks import needs_vllm

pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]  # whose process has loaded vLLM

TOKENS, COLUMNS, MIDDLE, EXPERTS, A_TOKEN = 16, 256, 256, 3, 2
RIGHT = (256, 1), (128, 2)  # divisions of both products
NAMES = [
    *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
    *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
    *("expert_tokens_meta", "apply_router_weight_on_input"),
]


class Marlin:
    """vLLM's MarlinExperts as the hook finds them; `by`: who computed."""

    by: list[str]
    divisions: list[tuple[tuple[int, int], ...]]
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
    from workers.vllm.kernels import quick_marlin
    from workers.vllm.release import custom_ops

    marlin = Marlin()
    marlin.by, marlin.divisions = [], []
    monkeypatch.delenv("POC_EXPERTS", raising=False)
    monkeypatch.setattr(custom_ops, "marlin_experts", lambda: Marlin)
    monkeypatch.setattr(fused, "is_on", lambda device: True)
    monkeypatch.setattr(quick_marlin, "LEAST", TOKENS * A_TOKEN)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    monkeypatch.setattr(quick_marlin, "compute", computed_by(marlin, {RIGHT}))
    ms = cycle((1.0, 2.0))  # ours, Marlin's
    monkeypatch.setattr(quick_marlin, "milliseconds", lambda compute: next(ms))
    return marlin


def computed_by(marlin: Marlin, *trials: set[Any]) -> Any:
    """The results. `trials`: the divisions that give Marlin's bits in each trial, the last for all
    further calls.
    """
    left = [one for one in trials[:-1] for _ in range(4)]

    def compute(call: Any, divisions: Any) -> None:
        assert call.limit == 7.0
        marlin.by.append("ours")
        marlin.divisions.append(divisions)
        right = left.pop(0) if left else trials[-1]
        call.out.copy_(call.x * (2.0 if divisions in right else 2.004))

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


@pytest.mark.parametrize("said", ["same", None])
def test_the_first_call_is_a_trial_and_chat_keeps_marlin(
    experts: Marlin, monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    from workers.vllm.kernels.quick_marlin import EVERY, QuickMarlin

    if said:
        monkeypatch.setenv("POC_EXPERTS", said)
    call(experts, QuickMarlin())
    assert experts.by == ["own", *["ours"] * 6, "own"]
    assert experts.divisions == [*EVERY, RIGHT, RIGHT]


def test_another_gpu_than_hoppers_keeps_marlin(
    experts: Marlin, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.vllm.kernels.quick_marlin import QuickMarlin

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    call(experts, QuickMarlin())
    assert experts.by == ["own"] * 3


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
    from workers.vllm.kernels.quick_marlin import QuickMarlin

    call(experts, QuickMarlin(), **other)
    assert experts.by == ["own"] * 3


def test_a_trial_that_cannot_tell_divisions_apart_is_repeated(
    experts: Marlin, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.vllm.kernels import quick_marlin

    every = {*quick_marlin.EVERY}
    by = computed_by(experts, every, {RIGHT, ((128, 2), (128, 2))}, {RIGHT})
    monkeypatch.setattr(quick_marlin, "compute", by)
    call(experts, quick_marlin.QuickMarlin(), n=4)
    a_trial = ["own", *["ours"] * 4]
    assert experts.by == [*a_trial, "own", *a_trial, "own", *a_trial, "ours", "ours", "own"]
    assert experts.divisions[12:] == [RIGHT, RIGHT]


def test_divisions_that_no_trial_tells_apart_are_left_to_marlin(
    experts: Marlin, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.vllm.kernels import quick_marlin

    every = {*quick_marlin.EVERY}
    monkeypatch.setattr(quick_marlin, "compute", computed_by(experts, every))
    trials = quick_marlin.MOST_TIES + 1
    call(experts, quick_marlin.QuickMarlin(), n=trials + 3)
    assert experts.by == [*trials * ["own", *["ours"] * 4, "own"], *["own"] * 4]


@pytest.mark.parametrize(
    ("right", "ms", "words"), [(set(), 1.0, "gives other bits: not used"), ({RIGHT}, 3.0, "")]
)
def test_other_bits_and_slower_ones_are_left_to_marlin(
    experts: Marlin,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    right: set[Any],
    ms: float,
    words: str,
) -> None:
    from workers.vllm.kernels import quick_marlin

    monkeypatch.setattr(quick_marlin, "compute", computed_by(experts, right))
    times = cycle((ms, 2.0))
    monkeypatch.setattr(quick_marlin, "milliseconds", lambda compute: next(times))
    call(experts, quick_marlin.QuickMarlin())
    assert experts.by[-2:] == ["own", "own"]
    assert words in caplog.text


def test_exact_experts_are_marlins(experts: Marlin, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm.kernels.quick_marlin import QuickMarlin

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

    from workers.vllm.kernels import quick_marlin
    from workers.vllm.kernels.ordered_rows import MARLIN, OrderedRows
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
    differing = {}
    for divisions in quick_marlin.EVERY:
        out.fill_(float("nan"))
        quick_marlin.compute(layer, divisions)
        differing[divisions] = int((out != expected).sum())
    assert 0 in differing.values(), differing
