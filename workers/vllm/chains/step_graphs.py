"""Decode steps recorded once for each shape and replayed, where a rank computes every layer.

Where anything speaks against it, steps run operation by operation. Tensor-parallel ranks record
and replay the same steps, and agree on it: a sum waits for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from cachetools import LRUCache
from torch import Tensor

from poc_core.arithmetic import reflections
from poc_core.schemes.base import Batch
from workers.vllm import cache_compat, compat, unseen
from workers.vllm.chains.kept_caches import KeptCaches, Place
from workers.vllm.chains.recording import (
    GraphRecorder,
    NotReplayableError,
    Recorder,
    Replay,
)
from workers.vllm.forward.bound_forward import BoundForward
from workers.vllm.forward.layout import BlockTables, DeviceBatch, Layout

logger = logging.getLogger(__name__)

# Shapes whose graph is kept: full and last micro-batches of a round and of a job beside it.
_GRAPHS_KEPT = 4
# Graphs that ranks record together in their life: vLLM's sums keep some memory of each, 8 MiB in
# all, of which chat's own graphs have a tenth.
_MOST_TOGETHER = 256

Caches = Callable[[], AbstractContextManager[None]]
T = TypeVar("T")

# Where a micro-batch's kept caches lie, its nonces, their positions, and vLLM's own buffers.
_Key = tuple[int, ...]


class StepGraphs:
    """Recorded steps by shape. Off until `on` is set."""

    def __init__(
        self,
        forward: BoundForward,
        kept: KeptCaches,
        n_layers: int,
        moe_layers: int,
        vocab_size: int | None,
        recorder: Recorder,
    ) -> None:
        """`moe_layers`: those that a seed leads; `vocab_size`: of a model that wants token ids."""
        self.on = False
        self.recorded = 0  # graphs so far
        self._together = compat.tensor_ranks()[1] > 1
        self.why_not = ""
        if not compat.has_all_layers():
            self.why_not = "several pipeline stages compute a step together"
        elif self._together and isinstance(recorder, GraphRecorder) and not unseen.is_on():
            self.why_not = f"several ranks compute a step together ({unseen.SWITCH}=on tries it)"
        self._forward = forward
        self._kept = kept
        self._layers = range(n_layers)
        self._moe_layers = moe_layers
        self._vocab_size = vocab_size
        self._recorder = recorder
        # None: a shape that was seen once, which has warmed it up.
        self._steps: LRUCache[_Key, RecordedStep | None] = LRUCache(_GRAPHS_KEPT)

    def hidden_states(self, held: DeviceBatch, layers: range, step: int) -> Tensor | None:
        """(nonces, hidden) after the final norm of one step; None: run it operation by operation.

        The next replay fills the same tensor.
        """
        batch, place, tables = held.batch, held.place, held.tables
        if not self.on or self.why_not or layers != self._layers or place is None or tables is None:
            return None
        if not batch.order.is_step(step) or batch.layer_vectors is None:
            return None
        key = (
            id(place),
            *place.shape,
            len(batch.nonces),
            batch.order.shape.positions,
            *cache_compat.workspaces(alike_on_ranks=self._together),
        )
        if key not in self._steps:
            if not self._together or self.recorded < _MOST_TOGETHER:
                self._steps[key] = None
            return None
        recorded = self._steps[key]
        try:
            if recorded is None:
                self._steps[key] = recorded = self._recorded(batch, tables, place, step)
            else:
                recorded.fill(batch, step)
        except Exception as error:  # whatever a backend says that cannot be recorded
            if self._together and recorded and not isinstance(error, NotReplayableError):
                raise  # an error of this rank: the others replay the step
            self.why_not = f"{type(error).__name__}: {error}"
            self._steps.clear()
            self._forward.forget_unfinished()
            logger.warning("steps of decode proofs go on without CUDA graphs: %s", self.why_not)
            return None
        return recorded.replayed()

    def _recorded(self, batch: Batch, tables: BlockTables, place: Place, step: int) -> RecordedStep:
        """The step, filled in. Whatever a backend says that cannot be recorded is raised."""
        recorded = _on_all_ranks(
            lambda: RecordedStep(batch, tables, self._moe_layers, self._vocab_size, self._recorder)
        )
        _on_all_ranks(lambda: recorded.fill(batch, step))
        _on_all_ranks(
            lambda: recorded.record(self._forward, self._layers, lambda: self._kept.bound(place))
        )
        self.recorded += 1
        return recorded


def _on_all_ranks(work: Callable[[], T]) -> T:
    """What the work gives; an error if a tensor-parallel rank failed at it. All ranks must ask."""
    failure: Exception | None = None
    try:
        done = work()
    except Exception as error:
        failure = error
    if not compat.do_all_tensor_ranks(failure is None):
        raise failure or NotReplayableError("another rank could not do it")
    return done


class RecordedStep:
    """A step of micro-batches of one shape and place; all that changes lies in its own tensors."""

    hidden_size: int

    def __init__(
        self,
        batch: Batch,
        tables: BlockTables,
        moe_layers: int,
        vocab_size: int | None,
        recorder: Recorder,
    ) -> None:
        vectors, positions = batch.layer_vectors, batch.order.shape.positions
        assert vectors is not None, "each nonce has vectors of its own"
        n, device = len(batch.nonces), vectors.device
        self.hidden_size = vectors.shape[-1]
        self._layout = Layout(tables, range(positions - 1, positions), most=positions)
        self._inputs = torch.empty(n, self.hidden_size, dtype=vectors.dtype, device=device)
        self._vocab_size = vocab_size
        self._token_ids = torch.zeros(n, dtype=torch.int32, device=device)
        self._vectors = torch.empty_like(vectors)  # (layers, hidden)
        self._of: object = None  # the scheme whose vectors they are
        self._hashes = torch.zeros(moe_layers, n, dtype=torch.int64, device=device)
        self._metadata: dict[str, Any] | None = None  # by layer
        self._recorder = recorder
        self._replay: Replay | None = None

    def fill(self, batch: Batch, step: int) -> None:
        """Makes it one step of a micro-batch. NotReplayableError: a step of another kind."""
        self._layout.move_to(batch.order.positions(step).start)
        self._inputs.copy_(batch.inputs(step))
        if self._vocab_size is not None:
            self._token_ids.copy_(batch.token_ids(step, self._vocab_size))
        if self._of is not batch.scheme:
            self._of = batch.scheme
            assert batch.layer_vectors is not None
            self._vectors.copy_(batch.layer_vectors)
        if len(self._hashes):
            self._hashes.copy_(batch.route_hashes(step, len(self._hashes)))
        metadata = cache_compat.of_any_step(self._layout.metadata())
        self._metadata = (
            metadata if self._metadata is None else self._recorder.renewed(self._metadata, metadata)
        )

    def record(self, forward: BoundForward, layers: range, caches: Caches) -> None:
        """Records the step, after `fill`; `caches()` binds the caches of its place."""

        ids = {} if self._vocab_size is None else {"input_ids": self._token_ids}

        def work() -> Tensor:
            assert self._metadata is not None, "nothing was filled in"
            output = forward.run(
                layers,
                self._layout,
                self._metadata,
                caches(),
                {"inputs_embeds": self._inputs.clone(), **ids},  # layers add to the inputs
                transform=self,
                experts=self._first_experts if len(self._hashes) else None,
            )
            return compat.final_hidden_states(output)

        self._replay = self._recorder.record(work)

    def replayed(self) -> Tensor:
        """Runs the step that was filled in: (nonces, hidden)."""
        assert self._replay is not None, "nothing was recorded"
        return self._replay()

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """See LayerTransform."""
        return reflections.reflect_terms(list(terms), self._vectors[layer])

    def _first_experts(self, moe_layer: int, n_experts: int) -> Tensor:
        return self._hashes[moe_layer] % n_experts
