"""Proof micro-batches through the deployed vLLM model, slice by slice, inside one of vLLM's worker processes.

A slice is a run of decoder layers, run as a pipeline stage of its own: chat may have the engine between two of them,
while the micro-batch's activations wait on the device. Every tensor-parallel rank runs the same code and makes the
inputs for itself; no tensor is sent to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cachetools import LRUCache
from pydantic import JsonValue

from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from poc_core.schemes import load_scheme
from poc_core.schemes.base import PrefillScheme, Scheme
from workers.engines.decoder_layers import find_decoder_layers
from workers.engines.kinds import LayerReflections
from workers.vllm import cache_compat, compat, profile
from workers.vllm.kv_isolation import NotIsolatableError, ScratchCaches
from workers.vllm.layer_hooks import transformed
from workers.vllm.layout import Layout
from workers.vllm.stopwatch import stopwatch_for
from workers.vllm.watch import Watch

# Schemes kept ready: a round and a few jobs beside it. Each holds per-layer vectors (a few MB), a distance scheme
# also its projection (8192 x hidden float32).
_SCHEMES_KEPT = 4
# Batch layouts (positions, block tables) kept: full and last micro-batches of a few jobs.
_LAYOUTS_KEPT = 8


@dataclass
class _Flight:
    """A micro-batch under way. `state`: what one slice hands to the next, each (n * seq_len, hidden)."""

    spec: ProofSpec
    nonces: Sequence[int]
    scheme: PrefillScheme
    state: dict[str, torch.Tensor] | None = None


@dataclass
class _Arrival:
    """Numbers of a micro-batch on their way to the host."""

    flight_id: int
    nonces: Sequence[int]
    scheme: PrefillScheme
    numbers: torch.Tensor  # on the host
    copied: torch.cuda.Event | None  # None: they are there


class ProofRunner:
    """Runs proof micro-batches on the model that a vLLM worker has loaded."""

    def __init__(self, worker: Any, reflections: LayerReflections = "fleet") -> None:
        """`worker`: vLLM's Worker after its KV cache was set up. Raises NotIsolatableError, LookupError."""
        self._worker = worker
        runner = worker.model_runner
        self._config = worker.vllm_config
        self._model = runner.get_model()
        self._device: torch.device = runner.device
        model_config = self._config.model_config
        self._dtype: torch.dtype = model_config.dtype
        self._hidden_size: int = model_config.get_hidden_size()
        text_config = model_config.hf_text_config
        if why_not := cache_compat.why_not_provable(self._model, self._config.cache_config.cache_dtype):
            raise NotIsolatableError(why_not)
        self._found = find_decoder_layers(self._model, text_config.num_hidden_layers, reflections)
        self._layers = self._found.modules
        self._owner = compat.layer_owner(self._model, self._layers, text_config)
        # Its first layers choose their experts by token id.
        self._vocab_size: int | None = text_config.vocab_size if text_config.model_type == "deepseek_v4" else None
        self._own = compat.own_layers(self._layers)
        self._reports = self._own.stop == len(self._layers) and compat.is_first_tensor_rank()
        self._caches = ScratchCaches(runner, self._config.compilation_config.static_forward_context)
        self._schemes: LRUCache[str, Scheme] = LRUCache(_SCHEMES_KEPT)
        self._layouts: LRUCache[tuple[int, int], Layout] = LRUCache(_LAYOUTS_KEPT)
        self._flights: dict[int, _Flight] = {}
        self._arrivals: list[_Arrival] = []
        self._sends: list[tuple[Any, dict[str, torch.Tensor]]] = []  # a handle, and the tensors it reads
        self._stopwatch = stopwatch_for(self._device)
        self._watch: Watch | None = None
        self._replicated = True  # whether layers give the same on all tensor-parallel ranks

    def describe(self) -> dict[str, Any]:
        """What the engine needs to know: sizes in elements, this rank's layers, whether they can be cut into slices."""
        return {
            "hidden_size": self._hidden_size,
            "n_layers": len(self._layers),
            "dtype": str(self._dtype).removeprefix("torch."),
            "layers": [self._own.start, self._own.stop],
            "sliceable": self._owner is not None,
            "layers_path": self._found.path,
            "reflected": self._found.reflected,
        }

    def watch(self, n_sequences: int, seq_len: int) -> None:
        """Begins to watch micro-batches of at most that size."""
        self._watch = Watch(self._caches, n_sequences, seq_len)

    def unwatch(self) -> dict[str, Any]:
        """Layers whose chat cache was touched since, and whether layers' outputs were the same on all ranks."""
        watch, self._watch = self._watch, None
        assert watch is not None, "unwatch without watch"
        return {"touched": watch.touched(), "replicated": watch.replicated}

    def settle(self, private: bool, replicated: bool) -> None:
        """How to go on: with a cache for each layer or with shared ones, and what is known of layers' outputs."""
        self._caches.private, self._replicated = private, replicated
        self._caches.forget()

    @torch.inference_mode()
    def tick(
        self,
        begin: Sequence[tuple[int, Mapping[str, Any], Sequence[int]]],
        slices: Sequence[tuple[int, int, int]],
        drop: Sequence[int],
        wait: bool,
    ) -> dict[str, Any]:
        """Runs at most one of `slices` (flight, first layer, end), the one of this rank's own layers.

        `begin`: flights (id, spec, nonces) that are new; `drop`: ids of flights that are given up; `wait`: until all
        that was launched is done. Answers {"refused": {id: why}, "ran": [(slice, seconds)], "values": {id: values}}: of
        what ended since the last tick, values on the reporting rank only. When it raises, all flights are gone.
        """
        for flight_id in drop:
            self._flights.pop(flight_id, None)
        self._sends = [(handle, tensors) for handle, tensors in self._sends if not handle.is_completed()]
        try:
            refused = self._begin(begin)
            for flight_id, first, end in slices:
                if flight_id not in refused and first in self._own:
                    self._run(flight_id, range(first, end))
            for flight_id, _first, end in slices:
                if flight_id not in refused and end == self._own.start:
                    self._receive(self._flights[flight_id])
            if wait:
                self._stopwatch.wait()
            return {"refused": refused, "ran": self._stopwatch.take(), "values": self._arrived(wait)}
        except BaseException:
            self._forget_all()
            raise

    @torch.inference_mode()
    def profile(self, fields: Mapping[str, Any], nonces: Sequence[int], watch: bool) -> dict[str, Any]:
        """One micro-batch, this rank's layers in one go and nothing beside them; `watch`: under the profiler.

        Answers a RankProfile's fields: without `watch` neither busy_s nor kernels. SpecError.
        """
        spec = ProofSpec.model_validate(fields)
        scheme = self._prefill_scheme(spec)
        flight_id = -1  # nobody else's
        try:
            flight = self._flights[flight_id] = _Flight(spec, nonces, profile.MarkedScheme(scheme) if watch else scheme)
            if self._own.start > 0:
                self._receive(flight)
            profile.synchronize(self._device)  # what the stage before took is no time of this one
            self._stopwatch.wait()
            self._stopwatch.take()
            if watch:
                with profile.marked_norms(self._model):
                    busy_s, kernels = profile.profiled(self._device, lambda: self._run(flight_id, self._own))
            else:
                busy_s, kernels = 0.0, []
                self._run(flight_id, self._own)
            self._stopwatch.wait()
            seconds = sum(seconds for _slice, seconds in self._stopwatch.take())
            self._arrived(wait=True)
        except BaseException:
            self._forget_all()
            raise
        flops = compat.matrix_flops([self._layers[index] for index in self._own], spec.seq_len)
        return {
            "first_layer": self._own.start,
            "seconds": seconds,
            "busy_s": busy_s,
            "flops": flops * len(nonces),
            "kernels": kernels,
        }

    def matrix_peak(self) -> dict[str, Any]:
        """The device's name, and floating-point operations a second of a large matrix product in the model's dtype."""
        peak = profile.matrix_peak(self._device, self._dtype)
        return {"device": profile.device_name(self._device), "peak_flops": peak}

    def _begin(self, flights: Sequence[tuple[int, Mapping[str, Any], Sequence[int]]]) -> dict[int, str]:
        refused: dict[int, str] = {}
        for flight_id, fields, nonces in flights:
            spec = ProofSpec.model_validate(fields)
            try:
                self._flights[flight_id] = _Flight(spec, nonces, self._prefill_scheme(spec))
            except SpecError as error:
                refused[flight_id] = str(error)
        return refused

    def _run(self, flight_id: int, layers: range) -> None:
        flight = self._flights[flight_id]
        n, seq_len = len(flight.nonces), flight.spec.seq_len
        self._stopwatch.begin()
        state, flight.state = flight.state, None
        inputs = flight.scheme.inputs(flight.nonces).view(n * seq_len, -1) if layers.start == 0 else None
        ids = None if self._vocab_size is None else flight.scheme.token_ids(flight.nonces, self._vocab_size).view(-1)
        hooked = flight.scheme if flight.scheme.transforms_layers and self._found.reflected else None
        layout = self._layout(n, seq_len)
        with (
            self._caches.bound(n, seq_len),
            transformed(self._layers, layers, hooked, self._watch),
            compat.virtual_stage(self._owner, layers, len(self._layers)),
            compat.forward_context(layout.metadata(), self._config, layout.n_tokens, layout.slot_mapping),
            compat.fused_kernels(),
        ):
            output = self._model(
                input_ids=ids,
                positions=layout.positions,
                intermediate_tensors=None if state is None else compat.intermediate(state),
                inputs_embeds=inputs,
            )
        if layers.stop == len(self._layers):
            if self._reports:
                hidden = compat.final_hidden_states(output)
                self._arrivals.append(self._depart(flight_id, flight, hidden.view(n, seq_len, -1)[:, -1]))
            del self._flights[flight_id]
        elif layers.stop == self._own.stop:
            compat.wait_for_pending_sends(self._worker)
            self._sends += [(handle, output.tensors) for handle in compat.send_to_next_stage(output.tensors)]
            del self._flights[flight_id]
        else:
            flight.state = output.tensors
        self._stopwatch.end((flight_id, layers.start, layers.stop))

    def _receive(self, flight: _Flight) -> None:
        n_tokens = len(flight.nonces) * flight.spec.seq_len
        flight.state = compat.between_stages(self._model, n_tokens, self._dtype, self._device)
        compat.receive_from_previous_stage(flight.state)

    def _depart(self, flight_id: int, flight: _Flight, last_hidden: torch.Tensor) -> _Arrival:
        """Turns the last states (n, hidden) into numbers and begins to copy them to the host."""
        numbers = flight.scheme.numbers(flight.nonces, last_hidden)
        copied = None
        if self._device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            numbers = host
        return _Arrival(flight_id, flight.nonces, flight.scheme, numbers, copied)

    def _arrived(self, wait: bool) -> dict[int, list[JsonValue]]:
        values: dict[int, list[JsonValue]] = {}
        while self._arrivals:
            first = self._arrivals[0]
            if first.copied is not None and not first.copied.query():
                if not wait:
                    break
                first.copied.synchronize()
            values[first.flight_id] = first.scheme.values(first.nonces, first.numbers)
            self._arrivals.pop(0)
        return values

    def _forget_all(self) -> None:
        """After an error: the engine host begins all flights anew."""
        self._flights.clear()
        self._arrivals.clear()
        self._sends.clear()
        self._stopwatch = stopwatch_for(self._device)
        compat.forget_unfinished_forward(self._model)

    def _scheme(self, spec: ProofSpec) -> Scheme:
        """SpecError: see load_scheme, or it cannot be computed on this deployment."""
        key = spec.model_dump_json()
        scheme = self._schemes.get(key)
        if scheme is None:
            scheme = self._schemes[key] = load_scheme(
                spec,
                hidden_size=self._hidden_size,
                n_layers=len(self._layers),
                device=self._device,
                dtype=self._dtype,
            )
        if not self._replicated and scheme.transforms_layers and not scheme.transform_is_linear:
            raise SpecError(
                "This model's layers leave parts of a sum on each tensor-parallel rank, so a scheme that divides their "
                "outputs by a norm cannot be computed; use sign_flips, or tensor_parallel 1."
            )
        return scheme

    def _prefill_scheme(self, spec: ProofSpec) -> PrefillScheme:
        scheme = self._scheme(spec)
        if not isinstance(scheme, PrefillScheme):
            raise SpecError(f"The vllm engine does not compute {spec.scheme} proofs yet; use --engine transformers.")
        return scheme

    def _layout(self, n: int, seq_len: int) -> Layout:
        layout = self._layouts.get((n, seq_len))
        if layout is None:
            layout = self._layouts[n, seq_len] = Layout(self._caches, n, seq_len, self._device)
        return layout
