"""A model's layers as vLLM runs them, and what it loads of a model, by release."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors


def forward_context(
    metadata: dict[str, Any],
    vllm_config: VllmConfig,
    n_tokens: int,
    slot_mapping: dict[str, torch.Tensor],
) -> AbstractContextManager[Any]:
    """The context a model forward runs in. Compiled code is skipped: it would not call the
    layers' hooks.
    """
    context: AbstractContextManager[Any] = set_forward_context(
        metadata, vllm_config, num_tokens=n_tokens, slot_mapping=slot_mapping, skip_compiled=True
    )
    return context


def layer_owner(model: nn.Module, layers: nn.ModuleList, text_config: Any) -> nn.Module | None:
    """The module whose forward runs `layers` from its `start_layer` to its `end_layer`; None:
    it cannot be asked to run part of them, or chat in between would overwrite what one layer
    leaves for the next.
    """
    shared = (
        getattr(text_config, "index_topk_freq", 1) > 1
        or "S" in (getattr(text_config, "index_topk_pattern", None) or "")
        or "shared" in (getattr(text_config, "indexer_types", None) or ())
    )
    if shared:  # sparse attention whose layers attend to the tokens that an earlier one chose
        return None
    for module in model.modules():
        if any(child is layers for child in module._modules.values()):
            return (
                module if hasattr(module, "start_layer") and hasattr(module, "end_layer") else None
            )
    return None


def own_layers(layers: nn.ModuleList) -> range:
    """Which decoder layers this pipeline stage has: the others are placeholders."""
    present = [index for index, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)]
    return range(present[0], present[-1] + 1) if present else range(0)


class _StageView:
    """The pipeline group as one slice of the model is to see it; all else is the real group's."""

    def __init__(self, group: Any, is_first: bool, is_last: bool) -> None:
        self._group = group
        self.is_first_rank = is_first
        self.is_last_rank = is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextmanager
def virtual_stage(owner: nn.Module | None, layers: range, n_layers: int) -> Iterator[None]:
    """Within: the model's forward runs just `layers`, as a pipeline stage that has no others
    would.
    """
    if owner is None:  # whole stages only: what the model does anyway
        yield
        return
    real, bounds = parallel_state._PP, (owner.start_layer, owner.end_layer)
    active: Any = getattr(owner, "_active_layers", None)
    parallel_state._PP = _StageView(real, layers.start == 0, layers.stop == n_layers)
    owner.start_layer, owner.end_layer = layers.start, layers.stop  # type: ignore[assignment]
    if active is not None:  # GLM-5.3-Flash's model chose them once and for all
        owner._active_layers = owner.layers[layers.start : layers.stop]  # type: ignore[index]
    try:
        yield
    finally:
        owner.start_layer, owner.end_layer = bounds
        if active is not None:
            owner._active_layers = active
        parallel_state._PP = real


def between_stages(
    model: nn.Module, n_tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Empty tensors of the shapes that a stage takes from the one before it."""
    empty: IntermediateTensors = model.make_empty_intermediate_tensors(  # type: ignore[operator]
        batch_size=n_tokens, dtype=dtype, device=device
    )
    tensors: dict[str, torch.Tensor] = empty.tensors
    return tensors


def intermediate(tensors: dict[str, torch.Tensor]) -> IntermediateTensors:
    """Makes a stage's input from the previous stage's output."""
    return IntermediateTensors(tensors)


def forget_unfinished_forward(model: nn.Module) -> None:
    """After a forward that an exception ended: shared experts keep what they had computed until
    a mixture of experts asks for it, and refuse to compute again, for chat too.
    """
    for module in model.modules():
        if type(module).__name__ == "SharedExperts":
            module._output = [None] * len(module._output)  # type: ignore[arg-type, assignment]


def norm_left_to_logits(model: nn.Module) -> nn.Module | None:
    """The final norm of a model whose forward ends before it, as Kimi-Linear's does since 0.28."""
    for module in model.modules():
        norm = getattr(getattr(module, "model", None), "norm", None)
        if isinstance(norm, nn.Module) and norms_in_logits(type(module)):
            return norm
    return None


def norms_in_logits(model: type) -> bool:
    """True if a class' logits begin with the final norm, by the names in their code."""
    compute = getattr(model, "compute_logits", None)
    return compute is not None and "norm" in inspect.unwrap(compute).__code__.co_names


def final_hidden_states(output: Any) -> torch.Tensor:
    """The hidden states that a model's forward gives; some give auxiliary ones beside them."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def make_up_weights(draw: Callable[[nn.Module], None]) -> None:
    """--load-format dummy has, in this process from now on, the weights that `draw` puts in."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class MadeUp(DummyModelLoader):
        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            draw(model)

    register_model_loader("dummy")(MadeUp)


def look_at_models_here() -> None:
    """Has vLLM look at a model's class in this process. Left alone, it imports all of itself in
    another one for each class that it meets for the first time: for CUDA, which must not begin in
    this one.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        vars(registry)["_run_in_subprocess"] = lambda look: look()
