"""Records a rank's decode steps once for each shape, and replays them. If recording is not
possible, steps run operation by operation. All tensor-parallel ranks must record and replay the
same steps, because a sum over ranks waits for all of them; so the ranks agree on what is recorded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from cachetools import LRUCache
from torch import Tensor

from poc_core.arithmetic import reflections
from poc_core.schemes.base import Batch
from workers.engines.shortage import is_of_memory
from workers.vllm.forward.bound_forward import BoundForward
from workers.vllm.forward.layout import BlockTables, DeviceBatch, Layout
from workers.vllm.forward.recording import NotReplayableError, Recorder, Replay, why_off
from workers.vllm.forward.seeded_gates import Gates
from workers.vllm.forward.step_caches import Place, StepCaches
from workers.vllm.release import kv_caches, model_parts, parallel

logger = logging.getLogger(__name__)

# Shapes whose graph is kept for each micro-batch in progress (one per pipeline stage): complete and
# last micro-batches of a round and of a concurrent job.
_GRAPHS_KEPT = 4
# Graphs that ranks may record together in their lifetime. For each sum in a graph, also in chat's,
# vLLM permanently uses 64 or, since 0.28, 128 bytes of 8 MiB: a model of 94 layers takes 3 MiB this
# way. After half of the graphs, only repeated shapes are recorded.
_MOST_TOGETHER = 128
_SHAPES_KNOWN = 256

Caches = Callable[[], AbstractContextManager[None]]
T = TypeVar("T")

# Address and shape of the kept caches, number of nonces, positions of a prefill, steps, and vLLM's
# buffers.
_Key = tuple[int, ...]


class StepGraphs:
    """The recorded decode steps of a rank, by shape. Nothing is recorded until `on` is set."""

    def __init__(
        self,
        forward: BoundForward,
        kept: StepCaches,
        layers: range,
        n_layers: int,
        gates: Gates,
        vocab_size: int | None,
        recorder: Recorder,
    ) -> None:
        """`layers`: the layers of this rank. `vocab_size`: None if the model needs no token ids."""
        self.on = False
        self.recorded = 0  # graphs so far
        self._most = sys.maxsize  # largest number of nonces for whose graph there is memory
        n_stages = parallel.n_stages()
        self._together = parallel.tensor_ranks()[1] > 1
        self.why_not = why_off(self._together)
        self._forward = forward
        self._kept = kept
        self._layers = layers
        self._n_layers = n_layers
        self._gates = gates
        self._vocab_size = vocab_size
        self._recorder = recorder
        # None: a shape that was run once, as a warm-up.
        self._steps: LRUCache[_Key, RecordedStep | None] = LRUCache(_GRAPHS_KEPT * n_stages)
        # number of micro-batches by shape
        self._begun: LRUCache[_Key, int] = LRUCache(_SHAPES_KNOWN)

    def output(self, held: DeviceBatch, layers: range, step: int) -> Any:
        """Runs a decode step from a recording. A shape is recorded when it occurs for the second
        time. Returns the hidden states (nonces, hidden) after the final norm, or the next stage's
        input. The next replay overwrites the returned tensor. Returns None if the caller must run
        the step operation by operation.
        """
        batch, place, tables = held.batch, held.place, held.tables
        if not self.on or self.why_not or layers != self._layers or place is None or tables is None:
            return None
        if not batch.order.is_step(step) or batch.layer_vectors is None:
            return None
        if len(batch.nonces) > self._most:
            return None
        key = (
            id(place),
            *place.shape,
            len(batch.nonces),
            *batch.order.shape,  # block tables depend on the prefill's positions, too
            *kv_caches.workspaces(alike_on_ranks=self._together),
        )
        if step == batch.order.n_parts:
            self._begun[key] = self._begun.get(key, 0) + 1
        if key not in self._steps:
            if self._may_record(key):
                self._steps[key] = None
            return None
        recorded = self._steps[key]
        try:
            if recorded is None:
                self._steps[key] = recorded = self._recorded(held, tables, place, step)
            else:
                recorded.fill(batch, step, held.state)
        except Exception as error:  # any error of a backend that cannot be recorded
            if self._together and recorded and not isinstance(error, NotReplayableError):
                raise  # only this rank has failed: the other ranks replay the step
            self._do_without(error, key, len(batch.nonces))
            return None
        held.state = None
        return recorded.replayed()

    def _do_without(self, error: Exception, key: _Key, n_nonces: int) -> None:
        """Stops recording after an error. If the error is a lack of memory, stops recording only
        for steps of `n_nonces` or more nonces.
        """
        self._forward.forget_unfinished()
        if is_of_memory(error) and self.recorded and not self._together:
            del self._steps[key]
            self._most = n_nonces - 1
            logger.warning("no memory for CUDA graphs of %d nonces a step: %s", n_nonces, error)
            return
        self.why_not = f"{type(error).__name__}: {error}"
        self._steps.clear()
        logger.warning("decode proofs continue without CUDA graphs: %s", self.why_not)

    def _may_record(self, key: _Key) -> bool:
        """Returns True if a step of this shape should be recorded. Several ranks together can
        record only a limited number of steps. After half of that number, only shapes that have
        occurred before are recorded.
        """
        if not self._together or self.recorded < _MOST_TOGETHER // 2:
            return True
        return self.recorded < _MOST_TOGETHER and self._begun.get(key, 0) > 1

    def _recorded(
        self, held: DeviceBatch, tables: BlockTables, place: Place, step: int
    ) -> RecordedStep:
        """Records a decode step with its current inputs. Can raise any error of vLLM or CUDA,
        because some attention backends cannot be recorded.
        """
        part = Part(self._layers, self._n_layers, self._gates.numbers, self._vocab_size)
        recorded = _on_all_ranks(lambda: RecordedStep(held.batch, tables, part, self._recorder))
        _on_all_ranks(lambda: recorded.fill(held.batch, step, held.state))
        recorded.record(self._forward, lambda: self._kept.bound(place))
        self.recorded += 1
        if self._together and self.recorded == _MOST_TOGETHER:
            logger.warning(
                "%d CUDA graphs of steps were recorded: other shapes run without graphs, because"
                " vLLM has no memory for more graphs until the worker restarts",
                self.recorded,
            )
        return recorded


def _on_all_ranks(work: Callable[[], T]) -> T:
    """Runs `work` and returns its result. If it fails on one tensor-parallel rank, raises an error
    on all of them. All ranks must call this function.
    """
    failure: Exception | None = None
    try:
        done = work()
    except Exception as error:
        failure = error
    if not parallel.do_all_tensor_ranks(failure is None):
        raise failure or NotReplayableError("the same work failed on another rank")
    return done


class Part(NamedTuple):
    """A rank's part of a recorded step: its layers, and the model's vocabulary."""

    layers: range
    n_layers: int  # of the model
    moe_layers: range  # layers with seeded experts, numbered through the model
    vocab_size: int | None  # set if the model needs token ids


class RecordedStep:
    """A recorded decode step of one shape, with the caches of one Place. All inputs are copied into
    the tensors that the recording reads.
    """

    hidden_size: int

    def __init__(self, batch: Batch, tables: BlockTables, part: Part, recorder: Recorder) -> None:
        vectors, positions = batch.layer_vectors, batch.order.shape.positions
        assert vectors is not None, "each nonce has vectors of its own"
        n, device = len(batch.nonces), vectors.device
        self.hidden_size = vectors.shape[-1]
        self._layout = Layout(tables, range(positions - 1, positions), most=positions)
        self._part = part
        self._inputs = torch.empty(n, self.hidden_size, dtype=vectors.dtype, device=device)
        self._state: dict[str, Tensor] = {}  # output of the previous stage
        self._token_ids = torch.zeros(n, dtype=torch.int32, device=device)
        self._vectors = torch.empty_like(vectors)  # (layers, hidden)
        self._of: object = None  # the scheme that the vectors belong to
        self._hashes = torch.zeros(len(part.moe_layers), n, dtype=torch.int64, device=device)
        self._metadata: dict[str, Any] | None = None  # by layer
        self._recorder = recorder
        self._replay: Replay | None = None

    def fill(self, batch: Batch, step: int, state: Mapping[str, Tensor] | None = None) -> None:
        """Copies the inputs of a micro-batch's step into the recording's tensors.
        NotReplayableError if the recording cannot compute this step. `state`: the output of the
        previous pipeline stage.
        """
        self._layout.move_to(batch.order.positions(step).start)
        if state is not None:
            self._state = self._state or {name: torch.empty_like(x) for name, x in state.items()}
            for name, x in state.items():
                self._state[name].copy_(x)
        else:
            self._inputs.copy_(batch.inputs(step))
            if self._part.vocab_size is not None:
                self._token_ids.copy_(batch.token_ids(step, self._part.vocab_size))
        if self._of is not batch.scheme:
            self._of = batch.scheme
            assert batch.layer_vectors is not None
            self._vectors.copy_(batch.layer_vectors)
        if len(self._hashes):
            self._hashes.copy_(batch.route_hashes(step, self._part.moe_layers))
        metadata = kv_caches.of_any_step(self._layout.metadata())
        self._metadata = (
            metadata if self._metadata is None else self._recorder.renewed(self._metadata, metadata)
        )

    def record(self, forward: BoundForward, caches: Caches) -> None:
        """Records the step, after `fill` has set its inputs. `caches`: returns a context that binds
        the step's caches. An error on one tensor-parallel rank raises an error on all of them.
        """

        def work() -> Any:
            assert self._metadata is not None, "nothing was filled in"
            return forward.run(
                self._part.layers,
                self._layout,
                self._metadata,
                caches(),
                self._arguments(),
                transform=self,
                experts=self._first_experts if len(self._hashes) else None,
            )

        self._replay = self._recorder.record(work)

    def replayed(self) -> Any:
        """Runs the step with the inputs that `fill` has set. Returns the hidden states (nonces,
        hidden), or the next stage's input.
        """
        assert self._replay is not None, "nothing was recorded"
        output = self._replay()
        if self._part.layers.stop == self._part.n_layers:
            return model_parts.final_hidden_states(output)
        # Copies, because the next replay can overwrite the tensors while they are being sent.
        return model_parts.intermediate({name: x.clone() for name, x in output.tensors.items()})

    def _arguments(self) -> dict[str, Any]:
        """Returns the model's arguments. Copies their tensors, because layers modify them."""
        given: dict[str, Any] = {}
        if self._part.vocab_size is not None:
            given["input_ids"] = self._token_ids
        if self._state:
            state = {name: x.clone() for name, x in self._state.items()}
            given["intermediate_tensors"] = model_parts.intermediate(state)
        else:
            given["inputs_embeds"] = self._inputs.clone()
        return given

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """Reflects the output tensors of a layer. See LayerTransform."""
        return reflections.reflect_terms(list(terms), self._vectors[layer])

    def _first_experts(self, moe_layer: int, n_experts: int) -> Tensor:
        return self._hashes[moe_layer - self._part.moe_layers.start] % n_experts
