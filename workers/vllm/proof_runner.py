"""One proof batch through the deployed vLLM model, inside one of vLLM's worker processes.

Every tensor- and pipeline-parallel rank runs the same code and makes the inputs for itself; no tensor is sent to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import JsonValue

from poc_core.records import ProofSpec
from poc_core.schemes import load_scheme
from poc_core.schemes.base import Scheme
from workers.vllm import compat
from workers.vllm.kv_isolation import FIRST_BLOCK, ScratchCaches, blocks_per_sequence

# Schemes kept ready: a round and a few jobs beside it. Each holds per-layer vectors (a few MB), a distance scheme
# also its projection (8192 x hidden float32).
_SCHEMES_KEPT = 4
# Batch layouts (positions, block tables, attention metadata) kept: full and last micro-batches of a few jobs.
_LAYOUTS_KEPT = 8


class ProofRunner:
    """Runs proof batches on the model that a vLLM worker has loaded."""

    def __init__(self, worker: Any) -> None:
        """`worker`: vLLM's Worker after its KV cache was set up. Raises NotIsolatableError, LookupError."""
        self._worker = worker
        runner = worker.model_runner
        self._config = worker.vllm_config
        self._model = runner.get_model()
        self._device: torch.device = runner.device
        model_config = self._config.model_config
        self._dtype: torch.dtype = model_config.dtype
        self._hidden_size: int = model_config.get_hidden_size()
        self._layers = compat.decoder_layers(self._model, model_config.hf_text_config.num_hidden_layers)
        self._caches = ScratchCaches(runner, self._config.compilation_config.static_forward_context)
        self._schemes: OrderedDict[str, Scheme] = OrderedDict()
        self._layouts: OrderedDict[tuple[int, int], _Layout] = OrderedDict()

    def describe(self) -> dict[str, Any]:
        """What the engine host needs to know: sizes in elements, `block_size` in tokens."""
        return {
            "hidden_size": self._hidden_size,
            "n_layers": len(self._layers),
            "block_size": self._caches.block_size,
            "dtype": str(self._dtype).removeprefix("torch."),
        }

    @torch.inference_mode()
    def compute(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue] | None:
        """One value per nonce (None: excluded), on the reporting rank; None on every other rank."""
        scheme = self._scheme(spec)
        n, seq_len = len(nonces), spec.seq_len
        first, last = compat.is_first_stage(), compat.is_last_stage()
        with self._caches.bound(n, seq_len), self._transformed_layers(scheme):
            layout = self._layout(n, seq_len)
            inputs = scheme.inputs(nonces).view(n * seq_len, self._hidden_size) if first else None
            received = None if first else compat.receive_from_previous_stage()
            context = compat.forward_context(layout.metadata(), self._config, n * seq_len, layout.slot_mapping)
            with context, compat.fused_kernels():
                output = self._model(
                    input_ids=None,
                    positions=layout.positions,
                    intermediate_tensors=received,
                    inputs_embeds=inputs,
                )
        if not last:
            compat.wait_for_pending_sends(self._worker)
            compat.send_to_next_stage(output)
            return None
        if not compat.is_reporting_rank():
            return None
        hidden = compat.final_hidden_states(output)
        return scheme.finish(nonces, hidden.view(n, seq_len, -1)[:, -1])

    def _scheme(self, spec: ProofSpec) -> Scheme:
        key = spec.model_dump_json()
        scheme = self._schemes.pop(key, None)
        if scheme is None:
            scheme = load_scheme(
                spec,
                hidden_size=self._hidden_size,
                n_layers=len(self._layers),
                device=self._device,
                dtype=self._dtype,
            )
        self._schemes[key] = scheme
        while len(self._schemes) > _SCHEMES_KEPT:
            self._schemes.popitem(last=False)
        return scheme

    @contextmanager
    def _transformed_layers(self, scheme: Scheme) -> Iterator[None]:
        """Apply the scheme after every decoder layer, for this batch only: chat must never see it."""
        handles = []
        try:
            if scheme.transforms_layers:
                for index, layer in enumerate(self._layers):
                    handles.append(layer.register_forward_hook(_after_layer(scheme, index)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _layout(self, n: int, seq_len: int) -> _Layout:
        key = (n, seq_len)
        layout = self._layouts.pop(key, None) or _Layout(self._caches, n, seq_len, self._device)
        self._layouts[key] = layout
        while len(self._layouts) > _LAYOUTS_KEPT:
            self._layouts.popitem(last=False)
        return layout


def _after_layer(scheme: Scheme, index: int) -> Any:
    def transform(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # (hidden_states, residual): both are transformed
            return tuple(scheme.transform_layer(index, x) if isinstance(x, torch.Tensor) else x for x in output)
        return scheme.transform_layer(index, output)

    return transform


class _Layout:
    """Where a batch of `n` sequences of `seq_len` tokens lies: the same for every batch of that shape."""

    def __init__(self, caches: ScratchCaches, n: int, seq_len: int, device: torch.device) -> None:
        starts = torch.arange(0, (n + 1) * seq_len, seq_len, dtype=torch.int32)
        lengths = torch.full((n,), seq_len, dtype=torch.int32)
        offsets = torch.arange(seq_len, dtype=torch.int64)
        self._groups = caches.groups
        self.positions = offsets.repeat(n).to(device)
        self._fields = {
            "query_start_loc": starts.to(device),
            "query_start_loc_cpu": starts,
            "seq_lens": lengths.to(device),
            "seq_lens_cpu_upper_bound": lengths,
            "_seq_lens_cpu": lengths,
            "_num_computed_tokens_cpu": torch.zeros_like(lengths),
            "num_reqs": n,
            "num_actual_tokens": n * seq_len,
            "max_query_len": seq_len,
            "max_seq_len": seq_len,
            "causal": True,
            "is_prefilling": torch.ones(n, dtype=torch.bool),
            "positions": self.positions,
        }
        self._tables: list[torch.Tensor] = []  # a group's blocks, (n, blocks per sequence) int32
        self.slot_mapping: dict[str, torch.Tensor] = {}  # a layer's slot of every token, (n * seq_len,) int64
        for group in caches.groups:
            per_sequence = blocks_per_sequence(seq_len, group.block_size)
            first_blocks = FIRST_BLOCK + per_sequence * torch.arange(n)
            self._tables.append((first_blocks[:, None] + torch.arange(per_sequence)).to(device, torch.int32))
            slots = (first_blocks[:, None] * group.block_size + offsets).view(-1).to(device)
            self.slot_mapping.update(dict.fromkeys(group.layer_names, slots))

    def metadata(self) -> dict[str, Any]:
        """Attention metadata by layer name; anew for each batch, as builders reuse buffers that chat steps fill."""
        by_layer: dict[str, Any] = {}
        for group, table in zip(self._groups, self._tables, strict=True):
            slots = self.slot_mapping[group.layer_names[0]]
            metadata = compat.build_attention_metadata(
                group.group, block_table_tensor=table, slot_mapping=slots, **self._fields
            )
            by_layer.update(dict.fromkeys(group.layer_names, metadata))
        return by_layer
