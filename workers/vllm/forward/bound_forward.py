"""Runs some layers of a vLLM model for a proof. During that call the model uses the proof's caches,
hooks and kernels in place of chat's.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from poc_core.schemes.base import LayerTransform
from workers.vllm.forward.handed_on import handed_on, with_all
from workers.vllm.forward.layout import Layout
from workers.vllm.forward.seeded_gates import FirstExperts, Gates
from workers.vllm.forward.watch import Watch
from workers.vllm.kernels.quick_block_experts import QuickBlockExperts
from workers.vllm.kernels.quick_experts import QuickExperts
from workers.vllm.kernels.quick_marlin import QuickMarlin
from workers.vllm.kernels.quick_norms import QuickNorms
from workers.vllm.kernels.quick_operations import QuickOperations
from workers.vllm.release import custom_ops, model_parts

# Outputs that the network transforms: hidden_states and residual, the first two of a layer.
_TERMS = 2


class BoundForward:
    """A model whose forward pass uses a proof's caches, hooks and kernels only during `run`."""

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        layers: nn.ModuleList,
        owner: nn.Module | None,
        gates: Gates,
    ):
        """`config`: vLLM's configuration. `owner`: see model_parts.layer_owner. `gates`: this
        stage's MoE routers.
        """
        self._model = model
        self._config = config
        self._layers = layers
        self._own = model_parts.stage_layers(layers)
        self._owner = owner
        self._gates = gates
        self._late_norm = model_parts.norm_left_to_logits(model)
        self._quick = QuickOperations()
        experts = (QuickExperts(), QuickBlockExperts(), QuickMarlin())
        self._stand_ins = (self._quick, QuickNorms(), *experts)

    def run(
        self,
        layers: range,
        layout: Layout,
        metadata: dict[str, Any],
        caches: AbstractContextManager[None],
        given: dict[str, Any],
        transform: LayerTransform | None,
        experts: FirstExperts | None,
        watch: Watch | None = None,
    ) -> Any:
        """Runs the decoder layers `layers`. Returns the model's output if `layers` end with the
        model's last layer, else the input of the next layer.

        `metadata`: the attention metadata, by layer. `caches`: a context that binds the proof's
        caches. `given`: further arguments of the model. These are inputs_embeds (tokens, hidden) if
        `layers` begin with the model's first layer, else intermediate_tensors, the output of the
        preceding layer. `experts`: see Gates.seeded.
        """
        before = given.get("intermediate_tensors")
        state = {} if before is None else before.tensors
        with (
            caches,
            transformed(self._layers, layers, transform, watch),
            self._gates.seeded(layers, experts),
            handed_on(self._layers, layers, self._own, state) as kept,
            model_parts.virtual_stage(self._owner, layers, len(self._layers)),
            model_parts.forward_context(
                metadata, self._config, layout.n_tokens, layout.slot_mapping
            ),
            custom_ops.fused_kernels(),
            self._with_kernels(),
        ):
            absent = {"input_ids": None, "intermediate_tensors": None, "inputs_embeds": None}
            output = self._model(positions=layout.positions, **absent | given)
            if layers.stop < len(self._layers):
                return model_parts.intermediate(with_all(output.tensors, kept))
            if self._late_norm is None:
                return output
            return self._late_norm(model_parts.final_hidden_states(output))

    @contextmanager
    def _with_kernels(self) -> Iterator[None]:
        """Replaces parts of vLLM's code with faster kernels inside the context."""
        with ExitStack() as exits:
            for one in self._stand_ins:
                exits.enter_context(one.bound())
            yield

    def settle(self, replicated: bool) -> None:
        """Sets whether the outputs of layers are equal on all tensor-parallel ranks. If they are,
        the ranks can divide the rows of MoE routers among themselves.
        """
        self._quick.settle(replicated)

    def forget_unfinished(self) -> None:
        """Resets the model after an exception has ended a forward pass."""
        model_parts.forget_unfinished_forward(self._model)


@contextmanager
def transformed(
    modules: nn.ModuleList, layers: range, scheme: LayerTransform | None, watch: Watch | None = None
) -> Iterator[None]:
    """Inside the context, hooks on `layers` pass each layer's output to `watch`, and then replace
    the output with the result of `scheme`'s transformation. None leaves out the watch or the
    transformation.
    """
    with ExitStack() as hooks:
        for index in layers:
            if watch is not None:
                hooks.enter_context(modules[index].register_forward_hook(_looked_at(watch)))
            if scheme is not None:
                after = _after_layer(scheme, index)
                hooks.enter_context(modules[index].register_forward_hook(after))
        yield


def _looked_at(watch: Watch) -> Any:
    def look(_module: Any, _args: Any, output: Any) -> None:
        watch.look(output[0] if isinstance(output, tuple) else output)

    return look


def _after_layer(scheme: LayerTransform, index: int) -> Any:
    def transform(_module: Any, _args: Any, output: Any) -> Any:
        outputs = output if isinstance(output, tuple) else (output,)
        first = [i for i, x in enumerate(outputs) if x is not None][:_TERMS]
        at = [i for i in first if _is_term(outputs[i], scheme.hidden_size)]
        terms = dict(zip(at, scheme.transform_terms(index, [outputs[i] for i in at]), strict=True))
        after = tuple(terms.get(i, x) for i, x in enumerate(outputs))
        return after if isinstance(output, tuple) else after[0]

    return transform


def _is_term(x: Any, hidden_size: int) -> bool:
    return isinstance(x, Tensor) and torch.is_floating_point(x) and x.shape[-1] == hidden_size
