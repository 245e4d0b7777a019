"""The fused kernel of logprobs gives what plain torch gives: on a GPU, and by Triton's interpreter,
which wants a process that has it from the beginning."""

import pytest
import torch

from tests.harness.interpreted import run_interpreted

pytestmark = pytest.mark.xdist_group("interpreted")

# Three parts of a row, the last one with fewer columns than are told.
VOCABULARY = 2 * 8192 + 3
TOKENS = [3, 9, VOCABULARY - 1]
ASKED = [(1.0, 5), (0.7, 2), (1e-4, 0)]  # temperature, best entries


def compare(device: str) -> None:
    from workers.vllm.chat import best  # here: nothing else of this module needs Triton

    logits = 4 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[1] = -torch.inf  # but for fewer than are told
    logits[1, [7, VOCABULARY - 2]] = torch.tensor([1.0, 0.5])
    padded = torch.nn.functional.pad(logits, (0, 5), value=99.0).to(device)
    tokens = torch.tensor(TOKENS, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        found = padded.to(dtype)[:, :VOCABULARY]
        for temperature, n_best in ASKED:
            ids, logprobs, ranks = best.scored(found, tokens, temperature, n_best)
            assert ids[:, 0].tolist() == TOKENS
            assert all(len(set(row)) == n_best for row in ids[:, 1:].tolist())
            assert torch.equal(found.gather(-1, ids[:, 1:]), found.topk(n_best).values)
            expected = (found.float() / temperature).log_softmax(-1).gather(-1, ids)
            torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-5)
            assert torch.equal(ranks, (found >= found.gather(-1, tokens[:, None])).sum(-1))


def test_the_interpreted_kernel_is_the_plain_expression() -> None:
    run_interpreted(__name__, "compare('cpu')")


@pytest.mark.gpu
def test_the_compiled_kernel_is_the_plain_expression() -> None:
    compare("cuda")
