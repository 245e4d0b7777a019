"""A micro-batch as the proof runner sees it, whatever its scheme: what goes into each pass and
what comes out of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue
from torch import Tensor

from poc_core.records import Passes
from poc_core.schemes import contract_of
from poc_core.schemes.base import PrefillScheme, Scheme, SteppedBatch, SteppedScheme
from workers.engines.ticks import PassOrder
from workers.vllm.forward.layer_hooks import LayerTransform

if TYPE_CHECKING:  # they import vLLM
    from workers.vllm.chains.kept_caches import Place
    from workers.vllm.forward.layout import BlockTables, Layout


class MicroBatch(ABC):
    """All tensors stay on the device; nothing waits for it."""

    def __init__(self, scheme: Scheme, nonces: Sequence[int], part: int | None = None) -> None:
        self.scheme = scheme
        self.nonces = nonces
        self.shape: Passes = contract_of(scheme.spec.scheme).passes(scheme.spec)
        self.order = PassOrder(len(nonces), part or len(nonces), self.shape.steps)

    def positions(self, step: int) -> range:
        """Those of each nonce that a pass computes."""
        rows, t = self.shape.rows, step - self.order.n_parts
        return range(rows) if t < 0 else range(rows + t, rows + t + 1)

    def n_tokens(self, step: int) -> int:
        return len(self.order.members(step)) * len(self.positions(step))

    def is_step(self, step: int) -> bool:
        """Whether a pass is one position of every nonce."""
        return step >= self.order.n_parts

    def is_last(self, step: int) -> bool:
        return step == self.order.n_passes - 1

    def has_points_after(self, step: int) -> bool:
        """Whether a step follows a pass, which needs its points."""
        return self.order.n_parts - 1 <= step < self.order.n_passes - 1

    @abstractmethod
    def inputs(self, step: int) -> Tensor:
        """The embeddings of a pass: (tokens, hidden)."""

    @abstractmethod
    def token_ids(self, vocab_size: int) -> Tensor:
        """What models that choose experts by token get beside them: (tokens,)."""

    @abstractmethod
    def transform(self, step: int) -> LayerTransform | None:
        """What happens after each layer; None: nothing."""

    @property
    def seeds_experts(self) -> bool:
        return False

    def first_experts(self, step: int, moe_layer: int, n_experts: int) -> Tensor | None:
        """The first of the experts that serve each row: int64 (tokens,). None: the gates choose."""
        return None

    @abstractmethod
    def take(self, step: int, states: Tensor) -> None:
        """The states of a pass after the final norm: (nonces, positions, hidden)."""

    @property
    def points(self) -> Tensor:
        """What the next step follows from: int64 (n,). May be written to."""
        raise AssertionError("no step follows")

    def follow(self, points: Tensor) -> None:
        """Another pipeline stage has taken the last pass's states, and these are its points."""
        raise AssertionError("no step follows")

    @abstractmethod
    def numbers(self) -> Tensor:
        """What values are made of, after the last pass."""

    @abstractmethod
    def values(self, numbers: Tensor) -> list[JsonValue]:
        """One per nonce; `numbers` on the host."""


class PrefillBatch(MicroBatch):
    """One forward, of which the last position counts."""

    def __init__(self, scheme: PrefillScheme, nonces: Sequence[int], reflected: bool) -> None:
        super().__init__(scheme, nonces)
        self._prefill = scheme
        self._transform = scheme if reflected and scheme.transforms_layers else None
        self._numbers: Tensor | None = None

    def inputs(self, step: int) -> Tensor:
        return self.scheme.inputs(self.nonces).view(-1, self.scheme.hidden_size)

    def token_ids(self, vocab_size: int) -> Tensor:
        return self.scheme.token_ids(self.nonces, vocab_size).view(-1)

    def transform(self, step: int) -> LayerTransform | None:
        return self._transform

    def take(self, step: int, states: Tensor) -> None:
        self._numbers = self._prefill.numbers(self.nonces, states[:, -1])

    def numbers(self) -> Tensor:
        assert self._numbers is not None, "no state was taken"
        return self._numbers

    def values(self, numbers: Tensor) -> list[JsonValue]:
        return self._prefill.values(self.nonces, numbers)


class ChainBatch(MicroBatch):
    """A prefill, in parts, and further steps; or one forward of all positions where their
    inputs are known. Its layers are transformed in every model.
    """

    def __init__(self, scheme: SteppedScheme, nonces: Sequence[int], part: int | None) -> None:
        super().__init__(scheme, nonces, part)
        self._batch = scheme.begin(nonces)
        self._first_states: list[Tensor] = []  # of the parts so far

    @property
    def layer_vectors(self) -> Tensor | None:
        """See SteppedBatch."""
        return self._batch.layer_vectors

    def route_hashes(self, step: int, moe_layers: int) -> Tensor:
        """Of a step, see SteppedBatch."""
        return self._batch.route_hashes(moe_layers, self.positions(step).start)

    def inputs(self, step: int) -> Tensor:
        if step >= self.order.n_parts:
            rows: Tensor | None = self._batch.next_inputs()
        elif self.shape.steps:
            rows = self._batch.prefill(self._slice(step))
        else:
            rows = self._batch.whole()
        assert rows is not None, "claims are known where there are no steps"
        return rows.reshape(-1, self.scheme.hidden_size)

    def token_ids(self, vocab_size: int) -> Tensor:
        raise AssertionError("such models are refused beforehand")

    def transform(self, step: int) -> LayerTransform | None:
        return _OfEachNonce(self._batch, self.scheme.hidden_size, self.order.members(step))

    @property
    def seeds_experts(self) -> bool:
        return True

    def first_experts(self, step: int, moe_layer: int, n_experts: int) -> Tensor | None:
        found = self._batch.first_experts(moe_layer, self.positions(step), n_experts)
        return None if found is None else found[self._slice(step)].reshape(-1)

    def take(self, step: int, states: Tensor) -> None:
        if step >= self.order.n_parts:
            self._batch.take(states)
        elif not self.shape.steps:  # those that steps would have had too
            self._batch.take(states[:, -1 - self._batch.n_steps :])
        else:
            self._first_states.append(states[:, -1:])
            if step == self.order.n_parts - 1:
                self._batch.take(torch.cat(self._first_states))
                self._first_states.clear()

    @property
    def points(self) -> Tensor:
        return self._batch.points

    def follow(self, points: Tensor) -> None:
        self._batch.follow(points)

    def numbers(self) -> Tensor:
        return self._batch.numbers()

    def values(self, numbers: Tensor) -> list[JsonValue]:
        return self._batch.values(numbers)

    def _slice(self, step: int) -> slice:
        members = self.order.members(step)
        return slice(members.start, members.stop)


class _OfEachNonce:
    """Layers' outputs come as rows of all nonces; a chain's may be transformed by the nonce's
    own vectors.
    """

    def __init__(self, batch: SteppedBatch, hidden_size: int, members: range) -> None:
        self.hidden_size = hidden_size
        self._batch = batch
        self._members = members

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        shaped = [x.reshape(len(self._members), -1, x.shape[-1]) for x in terms]
        after = self._batch.transform_terms(
            layer, shaped, slice(self._members.start, self._members.stop)
        )
        return [y.reshape(x.shape) for x, y in zip(terms, after, strict=True)]


def micro_batch(
    scheme: Scheme, nonces: Sequence[int], part: int | None, reflected: bool
) -> MicroBatch:
    """`part`: nonces of one forward of all rows, None for all; `reflected`: whether a prefill's
    layers are transformed in this model.
    """
    if isinstance(scheme, SteppedScheme):
        return ChainBatch(scheme, nonces, part)
    assert isinstance(scheme, PrefillScheme)
    return PrefillBatch(scheme, nonces, reflected)


@dataclass
class UnderWay:
    """A micro-batch under way. `state`: what one slice hands to the next, each (rows of the
    pass, hidden).
    """

    batch: MicroBatch
    state: dict[str, torch.Tensor] | None = None
    # Of one with steps, from its first slice here on: where its keys and values are kept.
    place: Place | None = None
    tables: BlockTables | None = None
    layout: Layout | None = None  # of its steps
