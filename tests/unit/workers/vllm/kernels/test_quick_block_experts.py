"""Kernels for experts in block FP8 stand in for vLLM's where they have its bits and take less
time."""

import sys
from inspect import Parameter, Signature, signature
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from poc_core.arithmetic import fused
from tests.harness.marks import needs_vllm

pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]  # whose process has loaded vLLM

TOKENS, COLUMNS, MIDDLE, EXPERTS, A_TOKEN = 16, 256, 128, 3, 2


class Quantised(NamedTuple):
    numbers: Tensor
    scales: Tensor


class Gates(NamedTuple):
    powers: bool
    limit: float = 0.0


class Tile(NamedTuple):
    rows: int
    wide: bool
    near: int
    warps: int
    stages: int


class Layer:
    """vLLM's experts as the hook finds them, and kernels that compute the same; who did."""

    def __init__(self) -> None:
        self.by: list[str] = []
        self.adds: dict[int, float] = {}  # to what tiles of so many rows compute
        self.can_multiply = True
        self.gates = Gates(False)
        layer = self

        class TritonExperts:
            quant_config = SimpleNamespace(use_fp8_w8a8=True, gemm1_clamp_limit=None)
            block_shape = (128, 128)
            w1_scale = w2_scale = torch.ones(1)
            w1_bias = w2_bias = _lora_context = None

            def activation(self) -> None: ...

            def apply(self, **given: Any) -> None:
                layer.by.append("own")
                given["output"].copy_(layer.answer(given["hidden_states"]))

            def moe_sum(self, products: Tensor, output: Tensor) -> None:
                assert products.shape == (*layer.chosen.shape, COLUMNS)
                output.copy_(products.sum(1))

        self.x = torch.randn(TOKENS, COLUMNS).to(torch.float8_e4m3fn)
        self.share, self.chosen = torch.rand(TOKENS, EXPERTS).topk(A_TOKEN)
        names = ("self", *self.arguments(TOKENS))
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        vars(TritonExperts.apply)["__signature__"] = Signature(parameters)
        self.experts: Any = TritonExperts

    def answer(self, x: Tensor) -> Tensor:
        return x.float().bfloat16() * 2

    def open_gates(
        self, out: Quantised, x: Quantised, _weights: Any, rows: Any, a_token: int, tile: Tile,
        gates: Gates,
    ) -> None:  # fmt: skip
        assert gates == self.gates
        assert out.numbers.dtype == torch.float8_e4m3fn
        assert (a_token, rows.block) == (A_TOKEN, tile.rows)
        assert x.numbers is self.given
        self.by.append(f"{tile.rows} rows")

    def multiply(
        self, out: Tensor, _x: Any, _weights: Any, share: Tensor, _rows: Any, tile: Tile
    ) -> None:
        assert torch.equal(share, self.share.flatten())
        found = self.answer(self.given) / A_TOKEN + self.adds.get(tile.rows, 0.0)
        out.copy_(found.repeat_interleave(A_TOKEN, 0))

    def arguments(self, rows: int) -> dict[str, Any]:
        """Of a call of vLLM's."""
        self.given = self.x[:rows]
        return {
            "output": torch.empty(rows, COLUMNS, dtype=torch.bfloat16), "hidden_states": self.given,
            "w1": torch.empty(EXPERTS, 2 * MIDDLE, COLUMNS),
            "w2": torch.empty(EXPERTS, COLUMNS, MIDDLE),
            "topk_weights": self.share, "topk_ids": self.chosen, "activation": "silu",
            "expert_map": None, "a1q_scale": torch.ones(1), "a2_scale": None,
            "workspace13": torch.empty(9999), "workspace2": torch.empty(1),
            "apply_router_weight_on_input": False,
        }  # fmt: skip

    def compute(self, rows: int = TOKENS, **other: Any) -> tuple[Tensor, list[str]]:
        """The experts' answer, and who computed."""
        self.by.clear()
        named = self.arguments(rows)
        self.experts().apply(**named | other)
        return named["output"], self.by


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    from workers.vllm.kernels import quick_block_experts as quick  # here: it imports vLLM
    from workers.vllm.kernels import trial
    from workers.vllm.release import custom_ops

    found = Layer()
    module = SimpleNamespace(
        TritonExperts=found.experts, invoke_fused_moe_triton_kernel=lambda: None
    )
    monkeypatch.setattr(custom_ops, "triton_experts", lambda: module)
    sorting = ModuleType("workers.vllm.kernels.sorted_rows")
    vars(sorting)["sorted_rows"] = lambda _chosen, block, _n: SimpleNamespace(block=block)
    monkeypatch.setitem(sys.modules, sorting.__name__, sorting)
    kernels = ModuleType("workers.vllm.kernels.block_experts")
    vars(kernels).update(
        Gates=Gates, Quantised=Quantised, Tile=Tile,
        open_gates_=found.open_gates, multiply_=found.multiply,
        can_multiply=lambda *_: found.can_multiply,
        can_multiply_down=lambda second: second.numbers.shape[2] == MIDDLE,
        rows_by_expert=lambda *_: TOKENS * A_TOKEN + 1,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "workers.vllm.kernels.block_experts", kernels)
    monkeypatch.setattr(quick, "TILES", [((rows, False, 1, 4, 3),) * 2 for rows in (64, 128)])
    monkeypatch.setattr(quick, "LEAST", TOKENS)
    monkeypatch.setattr(custom_ops, "scales_are_powers", lambda: found.gates.powers)
    monkeypatch.setattr(fused, "is_on", lambda _device: True)
    times = iter(range(1000, 0, -1))  # each way that is timed takes less than the one before
    monkeypatch.setattr(trial, "milliseconds", lambda _compute: float(next(times)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def quick_block_experts() -> Any:
    from workers.vllm.kernels.quick_block_experts import QuickBlockExperts

    return QuickBlockExperts()


def test_the_quickest_tiles_compute_what_vllm_does_after_one_trial(layer: Layer) -> None:
    expected, by = layer.compute()
    assert by == ["own"]
    with quick_block_experts().bound():
        found, by = layer.compute()
        assert torch.equal(found, expected)
        assert by == ["own", "64 rows", "128 rows", "128 rows"]
        again, by = layer.compute()
        assert torch.equal(again, expected)
        assert by == ["128 rows"]
    assert layer.compute()[1] == ["own"], "chat keeps vLLM's own"


def test_the_kernels_are_used_beside_those_for_16_bits(layer: Layer) -> None:
    from workers.vllm.kernels.quick_experts import QuickExperts

    # As in BoundForward: each hides vLLM's method from the next.
    others, quick = QuickExperts(), quick_block_experts()
    for _ in range(2):
        with others.bound(), quick.bound():
            _, by = layer.compute()
    assert by == ["128 rows"]


def test_where_vllms_scales_are_powers_of_two_the_kernels_are(layer: Layer) -> None:
    layer.gates = Gates(True)
    with quick_block_experts().bound():
        layer.compute()
        assert layer.compute()[1] == ["128 rows"]


@pytest.mark.parametrize(("powers", "by"), [(True, "10.0 of gates"), (False, "64 rows")])
def test_the_first_product_has_a_kernel_for_scales_that_are_powers_of_two(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, powers: bool, by: str
) -> None:
    from workers.vllm.kernels import quick_block_experts as quick

    def open_gates(out: Quantised, x: Quantised, _weights: Any, rows: Any, *more: Any) -> None:
        assert out.numbers.dtype == torch.float8_e4m3fn
        assert x.numbers is layer.given
        a_token, limit = more
        assert (rows.block, a_token) == (128, A_TOKEN)
        layer.by.append(f"{limit} of gates")

    kernels = ModuleType("workers.vllm.kernels.block_gates")
    vars(kernels).update(open_gates_=open_gates)
    monkeypatch.setitem(sys.modules, "workers.vllm.kernels.block_gates", kernels)
    monkeypatch.setattr("workers.vllm.kernels.block_gates", kernels, raising=False)
    tile = (128, False, 1, 4, 3)
    monkeypatch.setattr(quick, "TILES", [((64, *tile[1:]), (64, *tile[1:])), (None, tile)])
    limited = SimpleNamespace(clamp_limit=10.0 if powers else None)
    monkeypatch.setattr(layer.experts, "activation_config", limited, raising=False)
    layer.gates = Gates(powers, 10.0 if powers else 0.0)
    with quick_block_experts().bound():
        layer.compute()
        assert layer.compute()[1] == [by]


@pytest.mark.parametrize(("middle", "by"), [(MIDDLE, "128 rows down"), (2 * MIDDLE, "64 rows")])
def test_the_second_product_has_a_kernel_for_some_depths(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, middle: int, by: str
) -> None:
    from workers.vllm.kernels import quick_block_experts as quick

    def multiply(out: Tensor, x: Any, weights: Any, share: Tensor, rows: Any) -> None:
        assert rows.block == 128
        layer.multiply(out, x, weights, share, rows, Tile(rows.block, True, 1, 4, 3))
        layer.by[-1] += " down"

    kernels = ModuleType("workers.vllm.kernels.block_down")
    vars(kernels).update(multiply_=multiply)
    monkeypatch.setitem(sys.modules, "workers.vllm.kernels.block_down", kernels)
    monkeypatch.setattr("workers.vllm.kernels.block_down", kernels, raising=False)
    tile = (False, 1, 4, 3)
    monkeypatch.setattr(quick, "TILES", [((64, *tile), (64, *tile)), ((128, *tile), None)])
    weights = torch.empty(EXPERTS, COLUMNS, middle)
    with quick_block_experts().bound():
        layer.compute(w2=weights)
        assert layer.compute(w2=weights)[1] == [by]


def test_gates_with_a_limit_are_opened_within_it_where_vllm_does_so(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = SimpleNamespace(clamp_limit=10.0)
    monkeypatch.setattr(layer.experts, "activation_config", limited, raising=False)
    for gates, by in (
        (Gates(False, 10.0), ["own"]),  # vLLM 0.30 does not limit them there
        (Gates(True, 10.0), ["128 rows"]),
    ):
        layer.gates = gates
        with quick_block_experts().bound():
            layer.compute()
            assert layer.compute()[1] == by


def test_a_stream_under_capture_has_no_trial(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with quick_block_experts().bound():
        assert layer.compute()[1] == ["own"]


def test_tiles_of_other_bits_are_not_used(layer: Layer) -> None:
    expected, _ = layer.compute()
    layer.adds = {128: 1.0}
    with quick_block_experts().bound():
        for _ in range(2):
            found, by = layer.compute()
            assert torch.equal(found, expected)
    assert by == ["64 rows"]


@pytest.mark.parametrize("fault", ["other bits", "slower", "fails"])
def test_kernels_that_are_no_better_are_not_used(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    expected, _ = layer.compute()
    if fault == "other bits":
        layer.adds = {64: 1.0, 128: 1.0}
    elif fault == "slower":
        monkeypatch.setattr("workers.vllm.kernels.trial.milliseconds", lambda _one: 1.0)
    else:
        kernels = sys.modules["workers.vllm.kernels.block_experts"]
        monkeypatch.setattr(kernels, "multiply_", lambda *_args: 1 / 0)
    with quick_block_experts().bound():
        for _ in range(2):
            found, by = layer.compute()
            assert torch.equal(found, expected)
    assert by == ["own"]


def test_what_the_kernels_do_not_know_is_vllms(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quick_block_experts().bound():
        layer.compute()
        assert layer.compute()[1] == ["128 rows"]
        for other in (
            {"rows": TOKENS // 2},  # few: chat's steps are no larger
            {"activation": "gelu"},
            {"expert_map": [0]},  # other ranks' experts have no weights
            {"a2_scale": 1.0},
            {"apply_router_weight_on_input": True},
            {"output": torch.empty(COLUMNS, TOKENS, dtype=torch.bfloat16).t()},
            {"output": torch.empty(TOKENS, COLUMNS, dtype=torch.float16)},
            {"topk_weights": layer.share.double()},
        ):
            assert layer.compute(**other)[1] == ["own"], other
        for name, value in (
            ("quant_config", SimpleNamespace(use_fp8_w8a8=True, gemm1_clamp_limit=7.0)),
            ("quant_config", SimpleNamespace(use_fp8_w8a8=False, gemm1_clamp_limit=None)),
            ("block_shape", None),
            ("w1_bias", 1.0),
            ("_lora_context", object()),
            ("quantization_emulation", True),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(layer.experts, name, value, raising=False)
                assert layer.compute()[1] == ["own"], name
        layer.can_multiply = False
        assert layer.compute()[1] == ["own"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 768, 3072), (4, 1536, 4096), (5, 128, 256)])
@pytest.mark.parametrize(
    ("tokens", "powers", "limit"),
    [(16_384, False, None), (20_001, False, None), (16_384, True, None), (16_384, True, 0.5)],
)
def test_on_a_gpu_each_pair_of_tiles_gives_vllms_bits(
    shape: tuple[int, int, int],
    tokens: int,
    powers: bool,
    limit: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts, middle, columns = shape
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts import triton_moe
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.platforms import current_platform

    from workers.vllm.kernels import quick_block_experts as quick
    from workers.vllm.kernels import trial
    from workers.vllm.kernels.block_experts import DOWN_STEPS

    if not current_platform.is_device_capability(90):
        pytest.skip("the kernels were seen on Hopper alone")
    if limit is not None and "topk_ids" not in signature(triton_moe.swiglu_limit_func).parameters:
        pytest.skip("gates with a limit are opened by torch there, which rounds twice")
    for module in (triton_moe, fp8_utils):
        monkeypatch.setattr(module, "is_deep_gemm_e8m0_used", lambda: powers)
    generator = torch.Generator("cuda").manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def weights(rows: int, depth: int) -> tuple[Tensor, Tensor]:
        numbers = (100 * random(experts, rows, depth)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return numbers, random(experts, rows // 128, depth // 128).abs() / 5000

    x, x_scales = fp8_utils.per_token_group_quant_fp8(random(tokens, columns).bfloat16(), 128)
    (w1, w1_scales), (w2, w2_scales) = weights(2 * middle, columns), weights(columns, middle)
    share, chosen = random(tokens, experts).softmax(-1).topk(A_TOKEN)
    # Made so, it wants no whole engine's configuration.
    layer: Any = object.__new__(triton_moe.TritonExperts)
    layer.quantization_emulation, layer.gemm1_clamp_limit = False, limit
    layer.gemm1_alpha, layer.gemm1_beta = 1.0, 0.0
    layer.activation_config = SimpleNamespace(clamp_limit=limit)  # of later releases
    layer.quant_config = fp8_w8a8_moe_quant_config(w1_scales, w2_scales, block_shape=[128, 128])
    room = tokens * A_TOKEN * max(2 * middle, columns)

    def computed() -> Tensor:
        out = torch.empty(tokens, columns, dtype=torch.bfloat16, device="cuda")
        layer.apply(
            output=out, hidden_states=x, w1=w1, w2=w2, topk_weights=share, topk_ids=chosen.int(),
            activation=MoEActivation.SILU, global_num_experts=experts, expert_map=None,
            a1q_scale=x_scales, a2_scale=None, workspace13=out.new_empty(room),
            workspace2=out.new_empty(room), expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )  # fmt: skip
        return out

    expected = computed()
    monkeypatch.setattr(quick, "LEAST", 1)
    has_down = middle // 128 in DOWN_STEPS
    for tiles in quick.TILES:
        if (tiles[0] is None and not powers) or (tiles[1] is None and not has_down):
            continue
        monkeypatch.setattr(quick, "TILES", [tiles])
        times = iter((2.0, 1.0))  # the kernels are quicker than vLLM's own
        monkeypatch.setattr(trial, "milliseconds", lambda _compute, times=times: next(times))
        kernels = quick.QuickBlockExperts()
        with kernels.bound():
            for _ in range(2):
                assert torch.equal(computed(), expected)
        assert len([one for one in kernels._tiles.found.values() if one is not None]) == 1  # noqa: SLF001
