"""The model's forward of some of its layers, with what a proof binds to it for that one call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from workers.vllm import compat
from workers.vllm.chains.seeded_gates import FirstExperts, Gates
from workers.vllm.forward.layer_hooks import LayerTransform, transformed
from workers.vllm.forward.layout import Layout
from workers.vllm.start.watch import Watch


class BoundForward:
    """Chat never sees any of it."""

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        layers: nn.ModuleList,
        owner: nn.Module | None,
        gates: Gates,
    ):
        """`config`: vLLM's; `owner`: see compat.layer_owner."""
        self._model = model
        self._config = config
        self._layers = layers
        self._owner = owner
        self._gates = gates

    def run(
        self,
        layers: range,
        layout: Layout,
        metadata: dict[str, Any],
        caches: AbstractContextManager[None],
        inputs: torch.Tensor | None,
        *,
        ids: torch.Tensor | None = None,
        state: dict[str, torch.Tensor] | None = None,
        transform: LayerTransform | None = None,
        experts: FirstExperts | None = None,
        watch: Watch | None = None,
    ) -> Any:
        """What the model answers: hidden states after the last layer, else what the next one takes.

        `metadata`: of the layout, by layer; `inputs` (tokens, hidden) where `layers` begin with the
        first one, else `state`, what the layer before them gave.
        """
        with (
            caches,
            transformed(self._layers, layers, transform, watch),
            self._gates.seeded(layers, experts),
            compat.virtual_stage(self._owner, layers, len(self._layers)),
            compat.forward_context(metadata, self._config, layout.n_tokens, layout.slot_mapping),
            compat.fused_kernels(),
        ):
            return self._model(
                input_ids=ids,
                positions=layout.positions,
                intermediate_tensors=None if state is None else compat.intermediate(state),
                inputs_embeds=inputs,
            )

    def forget_unfinished(self) -> None:
        """After one that an exception ended."""
        compat.forget_unfinished_forward(self._model)
