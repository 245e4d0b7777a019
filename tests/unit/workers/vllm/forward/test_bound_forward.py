"""Which of a layer's outputs a scheme transforms."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poc_core.records import ProofSpec
from poc_core.schemes.base import Scheme, load_scheme

pytestmark = pytest.mark.xdist_group("engines")  # whose process has loaded vLLM

HIDDEN, TOKENS, COPIES = 16, 5, 4


class Layer(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self) -> Any:
        return self.output


@pytest.fixture
def scheme() -> Scheme:
    spec = ProofSpec(block_hash="block", public_key="key", seq_len=4)
    return load_scheme(
        spec, hidden_size=HIDDEN, n_layers=2, device=torch.device("cpu"), dtype=torch.float32
    )


def after(scheme: Scheme | None, output: Any) -> Any:
    from workers.vllm.forward.bound_forward import transformed  # here: it imports vLLM

    layers = nn.ModuleList([Layer(None), Layer(output)])
    with transformed(layers, range(1, 2), scheme):
        found = layers[1]()
    assert not layers[1]._forward_hooks, "chat would see it"
    return found


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def reflected(scheme: Scheme, x: Tensor) -> Tensor:
    return scheme.transform_terms(1, [x])[0]


def test_hyper_connections_have_their_first_two_outputs_reflected_and_nothing_else(
    scheme: Scheme,
) -> None:
    x, residual = random(TOKENS, HIDDEN), random(TOKENS, COPIES, HIDDEN)
    # The last is as wide as the hidden size.
    post, mix = (random(TOKENS, COPIES), random(TOKENS, HIDDEN))
    found = after(scheme, (x, residual, post, mix))
    assert torch.equal(found[0], reflected(scheme, x))
    assert torch.equal(found[1], reflected(scheme, residual))
    assert found[2] is post
    assert found[3] is mix
    assert not torch.equal(found[0], x)


def test_a_residual_that_is_not_there_stays_away(scheme: Scheme) -> None:
    x = random(TOKENS, HIDDEN)
    found = after(scheme, (x, None))
    assert torch.equal(found[0], reflected(scheme, x))
    assert found[1] is None


def test_an_output_that_is_not_there_is_not_counted(scheme: Scheme) -> None:
    """Kimi-Linear's layers since vLLM 0.28: hidden_states, None, residual."""
    x, residual = random(TOKENS, HIDDEN), random(2, TOKENS, HIDDEN)[1]
    found = after(scheme, (x, None, residual))
    assert torch.equal(found[0], reflected(scheme, x))
    assert found[1] is None
    assert torch.equal(found[2], reflected(scheme, residual))


def test_a_second_output_that_is_no_state_is_left_alone(scheme: Scheme) -> None:
    x, logits, ids = random(TOKENS, HIDDEN), random(TOKENS, 3), torch.arange(HIDDEN)
    assert after(scheme, (x, logits))[1] is logits
    assert after(scheme, (x, ids))[1] is ids


def test_a_single_output_stays_one(scheme: Scheme) -> None:
    x = random(COPIES, TOKENS, HIDDEN)
    assert torch.equal(after(scheme, x), reflected(scheme, x))


def test_without_a_scheme_nothing_happens() -> None:
    output = (random(TOKENS, HIDDEN), None)
    assert after(None, output) is output
