"""What hides vLLM's releases: here what can be seen without an engine."""

import torch

from tests.marks import needs_vllm


class SharedExperts(torch.nn.Module):
    """As vLLM's keep what they have computed, by name and attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._output: list[torch.Tensor | None] = [torch.ones(1), None]

    @property
    def is_free(self) -> bool:
        return self._output == [None, None]


@needs_vllm
def test_after_an_exception_shared_experts_compute_again() -> None:
    from workers.vllm import compat  # here: it imports vLLM

    experts = SharedExperts()
    compat.forget_unfinished_forward(torch.nn.Sequential(torch.nn.Linear(1, 1), experts))
    assert experts.is_free


@needs_vllm
def test_that_vllms_shared_experts_are_still_called_so() -> None:
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts as VllmsOwn

    assert VllmsOwn.__name__ == SharedExperts.__name__
    assert "_output" in VllmsOwn.__init__.__code__.co_names
