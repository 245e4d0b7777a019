"""Gates of experts whose logits a seed replaces, for the time of a slice."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poc_core.schemes.decode.steps import forced_logits
from tests.harness.samples import known
from workers.engines import seeded_routing
from workers.vllm.forward.seeded_gates import Gates

N_EXPERTS, TOP_K, WIDTH = 8, 2, 4
CONFIG = SimpleNamespace(num_experts_per_tok=TOP_K)


class Gate(nn.Module):
    """As vLLM's linear layers: (output, bias)."""

    def __init__(self, bare: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, N_EXPERTS)
        self.bare = bare

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(x)
        return logits if self.bare else (logits, None)


class Experts(nn.Module):
    def __init__(self, gate: str = "gate", bare: bool = False, asks: bool = True) -> None:
        super().__init__()
        self.experts = nn.Linear(WIDTH, WIDTH)
        setattr(self, gate, Gate(bare))
        self.name, self.asks = gate, asks

    def forward(self, x: Tensor) -> Any:
        logits: Any = getattr(self, self.name)(x) if self.asks else torch.zeros(len(x), N_EXPERTS)
        return logits[0] if isinstance(logits, tuple) else logits


def layers(*kinds: nn.Module) -> nn.ModuleList:
    return nn.ModuleList([nn.Sequential(kind) for kind in kinds])


def first(moe_layer: int, n_experts: int) -> Tensor:
    return torch.tensor([moe_layer, moe_layer + 1, moe_layer + 5]) % n_experts


X = torch.ones(3, WIDTH)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("name", ["gate", "router"])
def test_logits_are_those_that_lead_to_the_seeded_experts_and_plain_again_afterwards(
    name: str, bare: bool
) -> None:
    model = layers(nn.Linear(WIDTH, WIDTH), Experts(name, bare), Experts(name, bare))
    gates = Gates(model, range(3), CONFIG)
    assert (len(gates), gates.why_not()) == (2, None)
    plain = [layer(X) for layer in model[1:]]
    with gates.seeded(range(3), first):
        seeded = [layer(X) for layer in model[1:]]
    for moe_layer, logits in enumerate(seeded):
        assert torch.equal(
            logits, forced_logits(first(moe_layer, N_EXPERTS), N_EXPERTS, TOP_K, torch.float32)
        )
        assert logits.argmax(-1).tolist() == first(moe_layer, N_EXPERTS).tolist()
    assert all(
        torch.equal(layer(X), before) for layer, before in zip(model[1:], plain, strict=True)
    )


def test_layers_of_experts_are_counted_over_the_whole_model() -> None:
    """Also where a slice has some of them, and earlier pipeline stages others."""
    model = layers(Experts(), nn.Linear(WIDTH, WIDTH), Experts(), Experts())
    gates = Gates(model, range(1, 4), CONFIG)
    gates.first = 1
    with gates.seeded(range(3, 4), first):
        assert model[3](X).argmax(-1).tolist() == first(2, N_EXPERTS).tolist()
        assert model[2](X).max() < 50  # of another slice


def test_a_dense_model_has_nothing_to_seed() -> None:
    gates = Gates(layers(nn.Linear(WIDTH, WIDTH)), range(1), SimpleNamespace())
    assert (len(gates), gates.why_not()) == (0, None)
    with gates.seeded(range(1), first):
        pass


def test_a_prefill_leaves_gates_alone() -> None:
    model = layers(Experts())
    plain = model[0](X)
    with Gates(model, range(1), CONFIG).seeded(range(1), None):
        assert torch.equal(model[0](X), plain)


def test_a_gate_that_is_not_found_and_an_unknown_number_of_experts_are_said() -> None:
    unknown = known(Gates(layers(Experts("chooser")), range(1), CONFIG).why_not())
    assert "router cannot be seeded (the gate of Experts" in unknown
    uncounted = known(Gates(layers(Experts()), range(1), SimpleNamespace()).why_not())
    assert "number per token" in uncounted


@pytest.mark.parametrize(("said", "known_number"), [([TOP_K] * 2, TOP_K), ([TOP_K, 1], 0)])
def test_a_number_of_experts_for_each_layer_is_known_if_layers_are_alike(
    said: list[int], known_number: int
) -> None:
    """Hunyuan says the number by layer. Artifact proofs need none."""
    gates = Gates(layers(Experts()), range(1), SimpleNamespace(moe_topk=said))
    assert (gates.why_not() is None) is bool(known_number)


def test_a_gate_that_is_never_asked_is_an_error_and_not_a_wrong_value() -> None:
    model = layers(Experts(), Experts(asks=False))
    with (
        pytest.raises(RuntimeError, match="1 of 2 gates"),
        Gates(model, range(2), CONFIG).seeded(range(2), first),
    ):
        _ = [layer(X) for layer in model]


def test_rows_that_ranks_have_divided_are_an_error() -> None:
    model = layers(Experts())
    with (
        pytest.raises(RuntimeError, match="2 rows of 3"),
        Gates(model, range(1), CONFIG).seeded(range(1), first),
    ):
        model[0](X[:2])


def by_token(experts: Experts) -> Experts:
    """As DeepSeek-V4's first layers."""
    experts.get_submodule("gate").tid2eid = nn.Parameter(torch.zeros(1), requires_grad=False)
    return experts


def test_gates_that_route_by_token_keep_their_logits_and_are_not_counted() -> None:
    model = layers(by_token(Experts()), by_token(Experts()), Experts(), Experts())
    vars(model[2].get_submodule("0.gate"))["tid2eid"] = None  # as those of its later layers have
    gates = Gates(model, range(4), CONFIG)
    assert (len(gates), gates.why_not()) == (2, None)
    plain = model[0](X)
    with gates.seeded(range(4), first):
        found = [layer(X) for layer in model]
    assert torch.equal(found[0], plain)
    assert [logits.argmax(-1).tolist() for logits in found[2:]] == [
        first(m, N_EXPERTS).tolist() for m in range(2)
    ]
    # Of transformers' models too.
    assert seeded_routing.gates(list(model)) == [
        model[layer].get_submodule("0.gate") for layer in (2, 3)
    ]


def test_layers_that_route_by_token_beyond_the_first_stage_are_refused() -> None:
    """A later stage knows no points, and so no token ids."""
    model = layers(Experts(), by_token(Experts()))
    assert Gates(model, range(2), CONFIG).why_not() is None
    assert "pipeline stages" in str(Gates(model, range(1, 2), CONFIG).why_not())
