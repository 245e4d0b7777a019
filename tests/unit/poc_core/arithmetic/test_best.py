"""The fused kernel of logprobs gives what plain torch gives: by Triton's interpreter, and on a
GPU."""

import importlib
from types import ModuleType

import pytest
import torch

# Three parts of a row, the last one with fewer columns than are told.
VOCABULARY = 2 * 8192 + 3
TOKENS = [3, 9, VOCABULARY - 1]


@pytest.fixture
def best(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """For the device of this machine."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return importlib.reload(importlib.import_module("poc_core.fused.best"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("temperature", "n_best"), [(1.0, 5), (0.7, 2), (1e-4, 0)])
def test_it_is_the_plain_expression(
    best: ModuleType, dtype: torch.dtype, temperature: float, n_best: int
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = 4 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[1] = -torch.inf  # but for fewer than are told
    logits[1, [7, VOCABULARY - 2]] = torch.tensor([1.0, 0.5])
    padded = torch.nn.functional.pad(logits, (0, 5), value=99.0).to(device, dtype)
    logits, tokens = padded[:, :VOCABULARY], torch.tensor(TOKENS, device=device)
    ids, logprobs, ranks = best.scored(logits, tokens, temperature, n_best)
    assert ids[:, 0].tolist() == TOKENS
    assert all(len(set(row)) == n_best for row in ids[:, 1:].tolist())
    assert torch.equal(logits.gather(-1, ids[:, 1:]), logits.topk(n_best).values)
    expected = (logits.float() / temperature).log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(ranks, (logits >= logits.gather(-1, tokens[:, None])).sum(-1))
