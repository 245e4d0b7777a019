"""Layers with hyper-connections, cut anywhere, give the bits of those that are not."""

import ast
import importlib.util
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.marks import needs_vllm

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM

N_LAYERS, TOKENS, HIDDEN, STREAMS = 5, 3, 8, 4
# What vLLM's layers return by their own names, where these are not those of their arguments.
MODELS = {"deepseek_v4": "DeepseekV4DecoderLayer", "glm5next": "Glm5NextDecoderLayer"}


class Connected(nn.Module):
    """Closes the connections of the layer before and opens its own, in another order of adding
    than where both are done apart.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.weight = torch.randn(HIDDEN, HIDDEN, generator=generator)
        self.n_runs = 0

    def step(self, x: Tensor, residual: Any, post: Any, comb: Any) -> tuple[Tensor, ...]:
        self.n_runs += 1
        if post is None:
            residual = x if x.dim() == 3 else x[:, None].repeat(1, STREAMS, 1)
        else:
            residual = closed(x, residual, post, comb * 1.0000001)
        x = residual.mean(1) @ self.weight
        post = residual.std(2)
        return x, residual, post, post[:, :, None] * post[:, None, :]


def closed(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return (comb @ residual + post[:, :, None] * x[:, None]).tanh()


class DeepseekV4DecoderLayer(Connected):
    def forward(
        self, x: Any, positions: Any, input_ids: Any, post_mix: Any, res_mix: Any, residual: Any
    ) -> Any:
        return self.step(x, residual, post_mix, res_mix)


class Glm5NextDecoderLayer(Connected):
    def forward(
        self, positions: Any, hidden_states: Any, residual: Any, post: Any, comb: Any
    ) -> Any:
        return self.step(hidden_states, residual, post, comb)


class Model(nn.Module):
    """As vLLM's models run a stage's layers, and what they hand on."""

    def __init__(self, layer: type[Connected]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(index) for index in range(N_LAYERS))
        self.start_layer, self.end_layer = 0, N_LAYERS
        self.closed_rows: list[int] = []
        self.is_glm = layer is Glm5NextDecoderLayer
        if self.is_glm:
            self._active_layers = self.layers[:]

    def forward(self, inputs: Any, handed: Any) -> Any:
        from vllm.distributed import parallel_state
        from vllm.sequence import IntermediateTensors

        stage: Any = vars(parallel_state)["_PP"]
        x: Any = inputs
        residual: Any = None
        post: Any = None
        comb: Any = None
        if not stage.is_first_rank:
            x = handed["hidden_states"]
            residual = handed["residual"] if self.is_glm else None
        if self.is_glm:
            for layer in self._active_layers:
                x, residual, post, comb = layer(None, x, residual, post, comb)
            if not stage.is_last_rank:
                return IntermediateTensors({"hidden_states": x, "residual": residual})
            return closed(x, residual, post, comb)
        for layer in self.layers[self.start_layer : self.end_layer]:
            x, residual, post, comb = layer(x, None, None, post, comb, residual)
        x = closed(x, residual, post, comb)
        self.closed_rows.append(len(x))
        return x if stage.is_last_rank else IntermediateTensors({"hidden_states": x})


@pytest.fixture(params=[DeepseekV4DecoderLayer, Glm5NextDecoderLayer])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Model:
    from vllm.distributed import parallel_state

    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(parallel_state, "_PP", stage)
    return Model(request.param)


def parts(model: Model, cuts: tuple[int, ...], stage_ends: tuple[int, ...] = ()) -> Tensor:
    """The model's answer to layers that are cut there; `stage_ends`: where vLLM's stages end."""
    from workers.vllm.forward.handed_on import handed_on, with_all
    from workers.vllm.release import model_parts

    inputs = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7))
    state: dict[str, Tensor] = {}
    stages = [0, *stage_ends, N_LAYERS]
    for start, stop in zip((0, *cuts), (*cuts, N_LAYERS), strict=True):
        layers = range(start, stop)
        own = next(range(a, b) for a, b in pairwise(stages) if b >= stop)
        with (
            handed_on(model.layers, layers, own, state) as kept,
            model_parts.virtual_stage(model, layers, N_LAYERS),
        ):
            found: Any = model(inputs, state)
        if stop < N_LAYERS:
            state = with_all(found.tensors, kept)
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    assert not any(vars(layer)[kind] for layer in model.layers for kind in hooks), "chat's too"
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("cuts", [(1,), (4,), (2, 3), (1, 2, 3, 4)])
def test_cut_layers_give_the_bits_of_whole_ones(model: Model, cuts: tuple[int, ...]) -> None:
    whole = parts(model, ())
    assert torch.equal(parts(model, cuts), whole)
    assert torch.equal(parts(model, ()), whole)
    assert [layer.n_runs for layer in model.layers] == [3] * N_LAYERS, "no part runs another's"


def test_where_layers_are_cut_the_connections_of_one_row_are_closed(model: Model) -> None:
    parts(model, (1, 3))
    assert model.closed_rows == ([] if model.is_glm else [1, 1, TOKENS])


def test_what_a_stage_sends_to_another_rank_is_vllms_own(model: Model) -> None:
    """Other ranks know no more names; and a cut within a stage changes nothing of it."""
    by_stages = parts(model, (2,), stage_ends=(2,))
    assert not torch.equal(by_stages, parts(model, ())), "vLLM's own way gives other bits here"
    assert torch.equal(parts(model, (1, 2, 4), stage_ends=(2,)), by_stages)


def test_a_layer_of_another_kind_hands_on_what_vllm_says() -> None:
    from workers.vllm.forward.handed_on import handed_on, with_all

    layers = nn.ModuleList([nn.Identity(), nn.Identity()])
    x = torch.ones(TOKENS, HIDDEN)
    with handed_on(layers, range(1), range(2), {}) as kept:
        layers[0](x)
    assert with_all({"hidden_states": x}, kept) == {"hidden_states": x}


@pytest.mark.parametrize("folder", MODELS)
def test_vllms_layers_still_call_it_so(folder: str) -> None:
    """By their source: most of it imports on GPUs alone."""
    from workers.vllm.forward.handed_on import NAMES

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    roots = spec.submodule_search_locations or []
    files = [
        path for path in Path(roots[0], "models", folder).rglob("*.py") if "amd" not in path.parts
    ]
    found = [
        node
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == MODELS[folder]
    ]
    if not found:
        pytest.skip("this release of vLLM has no such model")
    for layer in found:
        (forward,) = (
            one for one in layer.body if isinstance(one, ast.FunctionDef) and one.name == "forward"
        )
        assert set(NAMES[layer.name]) <= {arg.arg for arg in forward.args.args}
