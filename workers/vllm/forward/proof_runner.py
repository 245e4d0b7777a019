"""Runs proof micro-batches through vLLM's model, slice by slice, in one of vLLM's processes. A
slice is a sequence of decoder layers that runs like a separate pipeline stage. Between two slices
chat can use the engine, while the micro-batch's activations stay on the device. Every
tensor-parallel rank runs the same code and generates its own inputs.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import JsonValue

from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from poc_core.schemes.base import Batch, PrefillScheme
from poc_core.schemes.decode.codebook import choose_codebook
from workers.engines.base import Slice
from workers.engines.decoder_layers import find_decoder_layers, n_routed_tokens
from workers.engines.ready_schemes import ReadySchemes
from workers.vllm.forward import profiler
from workers.vllm.forward.bound_forward import BoundForward
from workers.vllm.forward.kv_isolation import NotIsolatableError, ScratchCaches
from workers.vllm.forward.layout import DeviceBatch, Whereabouts
from workers.vllm.forward.recording import recorder_for
from workers.vllm.forward.seeded_gates import Gates
from workers.vllm.forward.stage_transfer import StageTransfer
from workers.vllm.forward.step_caches import StepCaches
from workers.vllm.forward.step_graphs import StepGraphs
from workers.vllm.forward.stopwatch import Spent, stopwatch_for
from workers.vllm.forward.watch import Watch
from workers.vllm.release import kv_caches, model_parts, parallel


class ProofRunner:
    """A runner of proof micro-batches on the model that this vLLM worker has loaded."""

    def __init__(self, worker: Any) -> None:
        """`worker`: vLLM's worker, which has allocated its KV cache. NotIsolatableError or
        LookupError if proofs cannot be computed with its model.
        """
        runner = worker.model_runner
        self._config = worker.vllm_config
        self._model = runner.get_model()
        self._device: torch.device = runner.device
        model_config = self._config.model_config
        self._dtype: torch.dtype = model_config.dtype
        self._hidden_size: int = model_config.get_hidden_size()
        text_config = model_config.hf_text_config
        if why_not := kv_caches.why_not_provable(
            self._model, self._config.cache_config.cache_dtype
        ):
            raise NotIsolatableError(why_not)
        self._found = find_decoder_layers(self._model, text_config.num_hidden_layers)
        self._layers = self._found.modules
        self._vocab_size = n_routed_tokens(text_config)
        self._own = model_parts.stage_layers(self._layers)
        self._reports = self._own.stop == len(self._layers) and parallel.is_first_tensor_rank()
        self._caches = ScratchCaches(runner, self._config.compilation_config.static_forward_context)
        self._kept = StepCaches(self._caches, self._device)
        self._gates = Gates(self._layers, self._own, text_config)
        owner = model_parts.layer_owner(self._model, self._layers, text_config)
        self._sliceable = owner is not None
        self._bound = BoundForward(self._model, self._config, self._layers, owner, self._gates)
        recorder = recorder_for(self._device, parallel.recorded_sums)
        self._graphs = StepGraphs(
            self._bound,
            self._kept,
            self._own,
            len(self._layers),
            self._gates,
            self._vocab_size,
            recorder,
        )
        self._schemes = ReadySchemes(
            self._hidden_size, len(self._layers), self._device, self._dtype
        )
        self._whereabouts = Whereabouts(self._caches, self._kept, self._device)
        self._micro_batches: dict[int, DeviceBatch] = {}
        # By a micro-batch's last slice: its numbers, on the host once the slice has ended.
        self._numbers: dict[tuple[int, ...], tuple[Batch, torch.Tensor]] = {}
        self._transfer = StageTransfer(worker, self._model, self._dtype, self._device)
        self._stopwatch = stopwatch_for(self._device)
        self._spent = Spent()
        self._watch: Watch | None = None

    def configure(self, codebook: str) -> dict[str, Any]:
        """Sets this process's codebook (see EngineOptions), which is possible only once. Returns
        this rank's properties, such as its layers, and the sizes that limit decode proofs.
        """
        return {
            "hidden_size": self._hidden_size,
            "n_layers": len(self._layers),
            "dtype": str(self._dtype).removeprefix("torch."),
            "layers": [self._own.start, self._own.stop],
            "sliceable": self._sliceable,
            "layers_path": self._found.path,
            "reflected": self._found.reflected,
            "moe_layers": len(self._gates),
            "kept_block": self._kept.block,
            "kept_state": self._kept.state,
            "no_chains": self._why_no_chains(),
            "codebook": choose_codebook(codebook),
        }

    def room_for_steps(self, n_places: int, limit_bytes: int | None) -> int:
        """Returns how many tokens the caches of each of `n_places` micro-batches can hold (see
        StepCaches.room).
        """
        return self._kept.room(n_places, limit_bytes)

    def reserve(self, n_places: int, n_tokens: int, moe_layers: Sequence[int]) -> None:
        """Reserves memory for decode steps. `moe_layers`: the number of MoE layers in each pipeline
        stage.
        """
        self._kept.reserve(n_places, n_tokens)
        self._gates.first = sum(moe_layers[: parallel.stage_index()])

    def use_graphs(self, on: bool) -> dict[str, Any]:
        """Sets whether decode steps are recorded and replayed. Returns the number of recorded
        steps, and the reason why recording is impossible ("" if it is possible).
        """
        self._graphs.on = on
        return {"recorded": self._graphs.recorded, "why_not": self._graphs.why_not}

    def watch(self, n_sequences: int, seq_len: int) -> None:
        """Starts checks (see class Watch) of micro-batches with at most `n_sequences` sequences of
        `seq_len` tokens.
        """
        self._watch = Watch(self._caches, n_sequences, seq_len)

    def unwatch(self) -> dict[str, Any]:
        """Ends the checks of class Watch. Returns the layers whose chat caches have changed, and
        whether the outputs of layers were equal on all tensor-parallel ranks.
        """
        watch, self._watch = self._watch, None
        assert watch is not None, "unwatch without watch"
        return {"touched": watch.touched(), "replicated": watch.replicated}

    def settle(self, private: bool, replicated: bool) -> None:
        """Sets whether each layer has a separate scratch cache, and whether the outputs of layers
        are equal on all tensor-parallel ranks.
        """
        self._caches.private, self._schemes.replicated = private, replicated
        self._bound.settle(replicated)
        self._caches.forget()

    @torch.inference_mode()
    def tick(
        self,
        begin: Sequence[tuple[int, Mapping[str, Any], Sequence[int], int | None]],
        slices: Sequence[Sequence[int]],
        drop: Sequence[int],
        wait: bool,
        fetch: int | None,
    ) -> dict[str, Any]:
        """Runs the slice in `slices` (see Slice) that consists of layers of this rank, if there is
        one. Returns what has ended since the last tick: {"refused": {id: reason}, "ran": [(slice,
        seconds)], "values": {id: values}}. Only one rank returns values. If an error is raised, all
        micro-batches are dropped.

        `begin`: id, spec, nonces and part (see MicroBatch) of each new micro-batch. `drop`: ids of
        cancelled micro-batches. `wait`, `fetch`: see Tick.
        """
        for micro_batch in drop:
            self._end(micro_batch)
        self._transfer.release_sent()
        self._spent.begin_tick()
        try:
            refused = self._begin(begin)
            wanted = [one for one in map(Slice._make, slices) if one.micro_batch not in refused]
            for one in wanted:
                if one.first in self._own:
                    self._run(one)
            for one in wanted:
                if one.end == self._own.start:
                    self._receive(one.micro_batch, one.step)
            # Last, as on every stage: otherwise two stages would wait for each other.
            for one in wanted:
                self._return_points(one)
            if wait or fetch is not None:
                self._stopwatch.wait(None if wait else fetch)
            ran = self._stopwatch.take()
            self._spent.end_tick([seconds for _slice, seconds in ran])
            return {"refused": refused, "ran": ran, "values": self._values_of(ran)}
        except BaseException:
            self._forget_all()
            raise

    def spent(self) -> dict[str, float]:
        """Returns how this rank has spent its time since the last call (see class Spent)."""
        return self._spent.take() | {"gaps_s": self._stopwatch.gaps_s()}

    @torch.inference_mode()
    def profile(
        self, fields: Mapping[str, Any], nonces: Sequence[int], watch: bool
    ) -> dict[str, Any]:
        """Computes a micro-batch in one slice of all of this rank's layers. Returns the fields of a
        RankProfile. SpecError if the spec is invalid, or if its scheme cannot be profiled.

        `fields`: the spec. `watch`: True uses torch's profiler; False returns busy_s 0 and no
        kernels.
        """
        spec = ProofSpec.model_validate(fields)
        scheme = self._schemes.of(spec)
        if not isinstance(scheme, PrefillScheme):
            raise SpecError(f"The time of {spec.scheme} proofs cannot be divided into parts.")
        own = Slice(-1, self._own.start, self._own.stop)  # this id is used for no other micro-batch
        try:
            watched = profiler.marked(scheme) if watch else scheme
            batch = watched.begin(nonces, reflected=self._found.reflected)
            self._micro_batches[own.micro_batch] = DeviceBatch(batch)
            if self._own.start > 0:
                self._receive(own.micro_batch, 0)
            profiler.synchronize(self._device)  # excludes the time of the previous stage
            self._stopwatch.wait()
            self._stopwatch.take()
            if watch:
                with profiler.marked_norms(self._model):
                    busy_s, kernels = profiler.profiled(self._device, lambda: self._run(own))
            else:
                busy_s, kernels = 0.0, []
                self._run(own)
            self._stopwatch.wait()
            seconds = sum(seconds for _slice, seconds in self._stopwatch.take())
            self._numbers.clear()
        except BaseException:
            self._forget_all()
            raise
        flops = profiler.matrix_flops([self._layers[index] for index in self._own], spec.seq_len)
        return {
            "first_layer": self._own.start,
            "seconds": seconds,
            "busy_s": busy_s,
            "flops": flops * len(nonces),
            "kernels": kernels,
        }

    def matrix_peak(self) -> dict[str, Any]:
        """Returns the device's name, and its speed in a matrix product of the model's dtype."""
        peak = profiler.matrix_peak(self._device, self._dtype)
        return {"device": profiler.device_name(self._device), "peak_flops": peak}

    def _begin(
        self, new: Sequence[tuple[int, Mapping[str, Any], Sequence[int], int | None]]
    ) -> dict[int, str]:
        refused: dict[int, str] = {}
        for micro_batch, fields, nonces, part in new:
            spec = ProofSpec.model_validate(fields)
            try:
                batch = self._schemes.of(spec).begin(nonces, part, self._found.reflected)
                if batch.seeds_experts and (why_not := self._why_no_chains()):
                    raise SpecError(why_not)
                self._micro_batches[micro_batch] = DeviceBatch(batch)
            except SpecError as error:
                refused[micro_batch] = str(error)
        return refused

    def _run(self, one: Slice) -> None:
        with self._spent.in_part("waits_s"):
            self._stopwatch.begin()
        with self._spent.in_part("launch_s"):
            for step in range(one.step, one.until):
                self._forward(one, step)
        self._stopwatch.end(tuple(one))

    def _forward(self, one: Slice, step: int) -> None:
        held, layers = self._micro_batches[one.micro_batch], range(one.first, one.end)
        batch, order = held.batch, held.batch.order
        recorded = None if self._watch else self._graphs.output(held, layers, step)
        output: Any = self._operations(held, layers, step) if recorded is None else recorded
        if layers.stop == len(self._layers):
            if self._reports or not order.is_last(step):
                hidden = model_parts.final_hidden_states(output)
                shape = len(order.members(step)), len(order.positions(step)), -1
                batch.take(step, hidden.view(shape))
            if order.has_points_after(step):
                parallel.as_first_tensor_rank_has_it(batch.points)
            if order.is_last(step) and self._reports:
                self._numbers[tuple(one)] = batch, _sent_to_host(batch.numbers())
        elif layers.stop == self._own.stop:
            self._transfer.send(output.tensors)
        else:
            held.state = output.tensors
        if order.is_last(step) and layers.stop == self._own.stop:
            self._end(one.micro_batch)

    def _values_of(
        self, ran: Sequence[tuple[tuple[int, ...], float]]
    ) -> dict[int, list[JsonValue]]:
        """Returns, by id, the values of micro-batches whose last slice is among `ran`."""
        values = {}
        for one, _seconds in ran:
            if (arrived := self._numbers.pop(one, None)) is not None:
                batch, numbers = arrived
                values[one[0]] = batch.values(numbers)
        return values

    def _operations(self, held: DeviceBatch, layers: range, step: int) -> Any:
        """Runs the layers operation by operation (no CUDA graph). Returns the model's output."""
        batch = held.batch
        with self._spent.in_part("metadata_s"):
            layout, caches = self._whereabouts.of(held, step)
            metadata = layout.metadata()
        given: dict[str, Any] = {}
        if self._vocab_size is not None:
            if held.token_ids is None or held.token_ids[0] != step:
                held.token_ids = step, self._token_ids(batch, step, self._vocab_size)
            given["input_ids"] = held.token_ids[1]
        if layers.start == 0:
            given["inputs_embeds"] = batch.inputs(step)
        if held.state is not None:
            given["intermediate_tensors"] = model_parts.intermediate(held.state)
            held.state = None
        return self._bound.run(
            layers,
            layout,
            metadata,
            caches,
            given,
            batch.transform(step),
            partial(batch.first_experts, step) if batch.seeds_experts else None,
            self._watch,
        )

    def _token_ids(self, batch: Batch, step: int, vocab_size: int) -> torch.Tensor:
        """Returns the token ids of a pass, int32 (tokens,). In later pipeline stages, the ids of a
        decode step are zeros: only the first stage has the previous step's results, which determine
        the ids, and no MoE router of a later stage reads ids.
        """
        if self._own.start > 0 and batch.order.is_step(step):
            n_tokens = batch.order.n_tokens(step)
            return torch.zeros(n_tokens, dtype=torch.int32, device=self._device)
        return batch.token_ids(step, vocab_size)

    def _end(self, micro_batch: int) -> None:
        """Drops a micro-batch that has ended or was cancelled on this rank; frees its caches."""
        held = self._micro_batches.pop(micro_batch, None)
        if held is not None and held.place is not None:
            self._kept.free(held.place)

    def _receive(self, micro_batch: int, step: int) -> None:
        held = self._micro_batches[micro_batch]
        held.state = self._transfer.receive(held.batch.order.n_tokens(step))

    def _return_points(self, one: Slice) -> None:
        """Passes the results of a decode pass (points) from the last pipeline stage to the first,
        which needs them for the next decode step. Does nothing if the slice did not end such a
        pass, or if there is only one stage.
        """
        held = self._micro_batches.get(one.micro_batch)
        if held is None or one.end != len(self._layers):
            return
        batch = held.batch
        if not batch.order.has_points_after(one.until - 1):
            return
        is_first, is_last = self._own.start == 0, self._own.stop == len(self._layers)
        if is_last and not is_first:
            self._transfer.send_points(batch.points)
        elif is_first and not is_last:
            batch.follow(self._transfer.receive_points(batch.order.n))

    def _forget_all(self) -> None:
        """Drops all micro-batches after an error. The engine's caller can restart them."""
        self._micro_batches.clear()
        self._caches.forget()  # perhaps grown for a batch that was too large
        self._kept.free_all()
        self._numbers.clear()
        self._transfer.forget()
        self._stopwatch = stopwatch_for(self._device)
        model_parts.forget_unfinished_forward(self._model)

    def _why_no_chains(self) -> str | None:
        """Returns why decode proofs cannot be computed with this model; None if they can."""
        return self._kept.why_not() or self._gates.why_not()


def _sent_to_host(numbers: torch.Tensor) -> torch.Tensor:
    """Starts copying `numbers` to the host, and returns the copy without waiting. The copy is
    complete when the device has finished its current work.
    """
    if numbers.device.type != "cuda":
        return numbers
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
