"""The layers of vLLM's models, and how vLLM loads and runs them, adapted to each release."""

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
    """Returns vLLM's context for a forward pass without compiled code, which calls no hooks."""
    context: AbstractContextManager[Any] = set_forward_context(
        metadata, vllm_config, num_tokens=n_tokens, slot_mapping=slot_mapping, skip_compiled=True
    )
    return context


def layer_owner(model: nn.Module, layers: nn.ModuleList, text_config: Any) -> nn.Module | None:
    """Returns the module whose forward runs `layers` from `start_layer` to `end_layer`; None if it
    cannot run only some layers, or if chat could overwrite data that one layer leaves for another.
    """
    shared = (
        getattr(text_config, "index_topk_freq", 1) > 1
        or "S" in (getattr(text_config, "index_topk_pattern", None) or "")
        or "shared" in (getattr(text_config, "indexer_types", None) or ())
    )
    if shared:  # sparse attention whose layers attend to tokens chosen by an earlier layer
        return None
    for module in model.modules():
        if any(child is layers for child in module._modules.values()):
            can_cut = hasattr(module, "start_layer") and hasattr(module, "end_layer")
            return module if can_cut else None
    return None


def stage_layers(layers: nn.ModuleList) -> range:
    """Returns the indices of this pipeline stage's layers. All other layers are placeholders."""
    present = [index for index, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)]
    return range(present[0], present[-1] + 1) if present else range(0)


class _StageView:
    """vLLM's pipeline group, changed so that the layers of one slice look like a complete stage."""

    def __init__(self, group: Any, is_first: bool, is_last: bool) -> None:
        self._group = group
        self.is_first_rank = is_first
        self.is_last_rank = is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextmanager
def virtual_stage(owner: nn.Module | None, layers: range, n_layers: int) -> Iterator[None]:
    """Makes the model's forward run only `layers` inside the context, as if they were a pipeline
    stage. `owner`: the result of layer_owner; None changes nothing.
    """
    if owner is None:  # complete stages only, which is the model's normal behaviour
        yield
        return
    real, bounds = parallel_state._PP, (owner.start_layer, owner.end_layer)
    active: Any = getattr(owner, "_active_layers", None)
    parallel_state._PP = _StageView(real, layers.start == 0, layers.stop == n_layers)
    owner.start_layer, owner.end_layer = layers.start, layers.stop  # type: ignore[assignment]
    if active is not None:  # GLM-5.3-Flash's model selects its layers once, at construction
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
    """Returns empty tensors in the shapes in which a pipeline stage receives activations."""
    empty: IntermediateTensors = model.make_empty_intermediate_tensors(  # type: ignore[operator]
        batch_size=n_tokens, dtype=dtype, device=device
    )
    tensors: dict[str, torch.Tensor] = empty.tensors
    return tensors


def intermediate(tensors: dict[str, torch.Tensor]) -> IntermediateTensors:
    """Returns a pipeline stage's input, made of the previous stage's output tensors."""
    return IntermediateTensors(tensors)


def forget_unfinished_forward(model: nn.Module) -> None:
    """Resets the shared experts of MoE layers after a failed forward pass. They refuse to compute
    again, even for chat, until their stored result is read.
    """
    for module in model.modules():
        if type(module).__name__ == "SharedExperts":
            module._output = [None] * len(module._output)  # type: ignore[arg-type, assignment]


def norm_left_to_logits(model: nn.Module) -> nn.Module | None:
    """Returns the model's final norm if the model's forward does not apply it, as in Kimi-Linear
    since 0.28. Returns None if the forward applies the norm.
    """
    for module in model.modules():
        norm = getattr(getattr(module, "model", None), "norm", None)
        if isinstance(norm, nn.Module) and norms_in_logits(type(module)):
            return norm
    return None


def norms_in_logits(model: type) -> bool:
    """Returns True if `compute_logits` applies the final norm, judging by the names in its code."""
    compute = getattr(model, "compute_logits", None)
    return compute is not None and "norm" in inspect.unwrap(compute).__code__.co_names


def final_hidden_states(output: Any) -> torch.Tensor:
    """Returns the hidden states of a model's output, which some models return first in a tuple."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def make_up_weights(draw: Callable[[nn.Module], None]) -> None:
    """Makes vLLM in this process call `draw` to fill the weights if --load-format is dummy."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class MadeUp(DummyModelLoader):
        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            draw(model)

    register_model_loader("dummy")(MadeUp)


def look_at_models_here() -> None:
    """Makes vLLM inspect model classes in this process. By default vLLM inspects each class in a
    new process, which imports all of vLLM, to keep CUDA uninitialised in this process.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        vars(registry)["_run_in_subprocess"] = lambda look: look()
