"""Random weights for models without any: as large as a trained model's, in every number format."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.marks import needs_vllm
from workers.vllm.start import random_weights

ROWS, COLUMNS = 256, 512


def holder(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def from_4_bits(packed: Tensor, values: list[float]) -> Tensor:
    bits = packed.view(torch.uint8).int()
    return torch.tensor(values)[torch.stack([bits & 15, bits >> 4])]


MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
INT4 = [*range(-8, 8)]


@pytest.mark.parametrize(
    ("weight", "scale", "unscaled"),
    [
        (
            {"weight": torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)},
            {},
            lambda weight: weight.float(),
        ),
        (
            {"w13_weight": torch.zeros(4, ROWS, COLUMNS, dtype=torch.float8_e4m3fn)},
            {"w13_weight_scale_inv": torch.zeros(4, 2, 4)},
            lambda weight: weight.float(),
        ),
        (
            {"w2_weight": torch.zeros(4, ROWS, COLUMNS // 2, dtype=torch.uint8)},
            {"w2_weight_scale": torch.zeros(4, ROWS, COLUMNS // 32, dtype=torch.uint8)},
            lambda weight: from_4_bits(weight, [*MXFP4, *(-one for one in MXFP4)]),
        ),
        (
            {"weight_packed": torch.zeros(ROWS, COLUMNS // 8, dtype=torch.int32)},
            {"weight_scale": torch.zeros(ROWS, COLUMNS // 32, dtype=torch.bfloat16)},
            lambda weight: from_4_bits(weight, [float(one) for one in INT4]),
        ),
    ],
    ids=["bfloat16", "block-fp8", "mxfp4", "int4"],
)
def test_weights_times_their_scales_are_as_large_as_trained_ones(
    weight: dict[str, Tensor], scale: dict[str, Tensor], unscaled: Any
) -> None:
    """Within a power of two, which is all that a scale of eight bits can say."""
    module = holder(**weight, **scale)
    random_weights.draw(module)
    own = dict(module.named_parameters())
    (drawn,) = (own[name] for name in weight)
    factors = {
        float(2.0 ** (one.data.flatten()[0].int() - 127)) if one.dtype is torch.uint8 else float(x)
        for one in (own[name] for name in scale)
        for x in one.data.float().unique()
    }
    (factor,) = factors or {1.0}
    spread = float(unscaled(drawn.data).square().mean().sqrt()) * factor
    assert 0.7 < spread / random_weights.SPREAD < 1.42


def test_what_is_no_weight_changes_nothing() -> None:
    """Norms and scales of activations are one; what numbers experts and groups stays."""
    norm = nn.RMSNorm(8)
    index = torch.arange(8, dtype=torch.int32).view(2, 4)
    other = holder(
        weight=torch.zeros(4, 4), k_scale=torch.zeros(1), input_scale=torch.zeros(1),
        w13_weight_g_idx=index.clone(), tid2eid=index.clone(),
    )  # fmt: skip
    random_weights.draw(nn.ModuleList([norm, other]))
    assert torch.equal(norm.weight, torch.ones(8))
    own = dict(other.named_parameters())
    assert float(own["k_scale"]) == float(own["input_scale"]) == 1.0
    assert torch.equal(own["w13_weight_g_idx"], index)
    assert torch.equal(own["tid2eid"], index)


def test_all_ranks_draw_the_same_of_a_name_and_others_of_another() -> None:
    first, again = (nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}) for _ in range(2))
    for model in (first, again):
        random_weights.draw(model)
    one, two = first["a"].state_dict(), again["a"].state_dict()
    assert torch.equal(one["weight"], two["weight"])
    assert not torch.equal(one["weight"], first["b"].state_dict()["weight"])


def test_a_weight_larger_than_a_chunk_is_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "_CHUNK", 100)
    module = holder(weight=torch.zeros(30, 10), turned=torch.zeros(30, 10).t())
    random_weights.draw(module)
    assert all(bool((one != 0).all()) for one in module.parameters())


@needs_vllm
@pytest.mark.xdist_group("engines")
@pytest.mark.parametrize(("asked", "drawn"), [("dummy", True), ("auto", False)])
def test_vllms_loader_of_dummy_weights_draws_them_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, drawn: bool
) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor import model_loader

    from workers.vllm.release import model_parts

    known = vars(model_loader)["_LOAD_FORMAT_TO_MODEL_LOADER"]
    monkeypatch.setitem(known, "dummy", known["dummy"])
    monkeypatch.setenv(random_weights.VARIABLE, "")  # is undone, also what is set below
    monkeypatch.delenv(random_weights.VARIABLE)
    random_weights.ask_for(asked)
    if random_weights.are_enabled():
        model_parts.make_up_weights(random_weights.draw)
    loader: Any = model_loader.get_model_loader(LoadConfig(load_format="dummy"))
    layer = nn.Linear(64, 64)
    loader.load_weights(nn.Sequential(layer), SimpleNamespace())
    spread = float(layer.weight.detach().std())
    assert (spread > random_weights.SPREAD / 2) is drawn
