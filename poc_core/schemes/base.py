"""The interface of a scheme to engines: inputs, transformations after layers, values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from pydantic import JsonValue
from torch import Tensor

from poc_core.arithmetic import rng
from poc_core.arithmetic.reflections import layer_vectors
from poc_core.errors import SpecError
from poc_core.records import Passes, PassOrder, ProofSpec


class LayerTransform(Protocol):
    """Transforms each layer's output; a Scheme is one."""

    hidden_size: int

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """A layer's output tensors (..., hidden), transformed, maybe in place. `layer`: global."""


class Scheme(ABC):
    """One proof scheme, prepared for one spec on one model and device; serves many batches.
    Parameters: `hidden_size` of the model, `n_layers` of the whole model (also under pipeline
    parallelism), `device` and `dtype` of its activations. SpecError: see `prepare`.
    """

    # False: `transform_layer` changes nothing, so an engine need not hook any layer.
    transforms_layers: bool = True
    # True: transforming a sum is transforming its terms, so an engine may transform a layer's
    # hidden_states + residual at once. False: each apart, as the reference does.
    transform_is_linear: ClassVar[bool] = True
    # Whether inputs are seeded with the whole digest (rng.inputs).
    stronger_rng: bool = False

    def __init__(
        self,
        spec: ProofSpec,
        *,
        hidden_size: int,
        n_layers: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if spec.seq_len < 1:
            raise SpecError(f"seq_len must be at least 1, not {spec.seq_len}.")
        self.spec = spec
        self.hidden_size = hidden_size
        self.n_layers = n_layers
        self.device = device
        self.dtype = dtype
        self.prepare()

    def prepare(self) -> None:
        """Makes what all batches share. SpecError: the spec's options cannot be followed."""
        return

    def reflections(self) -> Tensor:
        """The vectors of the layers' reflections, see reflections.layer_vectors."""
        return layer_vectors(
            self.spec.block_hash, self.n_layers, self.hidden_size, self.device, self.dtype
        )

    @property
    def passes(self) -> Passes:
        """Returns the forward passes of each nonce, see Contract.passes."""
        return Passes(self.spec.seq_len)

    @abstractmethod
    def begin(
        self, nonces: Sequence[int], part: int | None = None, reflected: bool = True
    ) -> Batch:
        """A new micro-batch.

        `part`: nonces of one forward of all rows, None: all. `reflected`: whether the network
        transforms a prefill's layers in this model.
        """

    def inputs(self, nonces: Sequence[int]) -> Tensor:
        """The input embeddings: (n, seq_len, hidden), model dtype, on the device."""
        spec = self.spec
        return rng.inputs(
            spec.block_hash,
            spec.public_key,
            nonces,
            spec.seq_len,
            self.hidden_size,
            self.device,
            self.dtype,
            self.stronger_rng,
        )

    def token_ids(self, nonces: Sequence[int], vocab_size: int) -> Tensor:
        """Tokens for models that route by them (protocol.md, 2.1): int32 (n, seq_len)."""
        spec = self.spec
        return rng.token_ids(
            spec.block_hash, spec.public_key, nonces, spec.seq_len, vocab_size, self.device
        )

    @abstractmethod
    def transform_layer(self, layer: int, x: Tensor) -> Tensor:
        """A layer's output x (..., hidden), transformed, as a new tensor. `layer`: global index."""

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """`transform_layer` of each tensor (..., hidden) of a layer's output; may be in place."""
        return [self.transform_layer(layer, x) for x in terms]

    def _nonce_name(self, nonce: int) -> str:
        return f"{self.spec.block_hash}_{self.spec.public_key}_nonce_{nonce}"


class PrefillScheme(Scheme):
    """A scheme whose values come from the last position's state of one forward."""

    def begin(
        self, nonces: Sequence[int], part: int | None = None, reflected: bool = True
    ) -> Batch:
        return PrefillBatch(self, nonces, reflected)

    @abstractmethod
    def numbers(self, nonces: Sequence[int], last_hidden: Tensor) -> Tensor:
        """Computes the tensors of the nonces' values from normed last states (n, hidden), any
        dtype.

        Stays on the device and waits for nothing. NaN marks a nonce whose state is not finite.
        """

    @abstractmethod
    def values(self, nonces: Sequence[int], numbers: Tensor) -> list[JsonValue]:
        """One value per nonce, on the host. None: its state is not finite: excluded, not wrong."""

    def finish(self, nonces: Sequence[int], last_hidden: Tensor) -> list[JsonValue]:
        """`numbers` and `values` at once."""
        return self.values(nonces, self.numbers(nonces, last_hidden).cpu()) if nonces else []


class Batch(ABC):
    """A micro-batch of one scheme: what goes into each of its passes and what comes out of it.

    All tensors stay on the device; nothing waits for it. Steps are numbered as `order` says.
    """

    seeds_experts: ClassVar[bool] = False

    def __init__(self, scheme: Scheme, nonces: Sequence[int], part: int | None) -> None:
        """`part`: nonces of one forward of all rows; None: all."""
        self.scheme = scheme
        self.nonces = nonces
        self.order = PassOrder(len(nonces), part or len(nonces), scheme.passes)

    @abstractmethod
    def inputs(self, step: int) -> Tensor:
        """The embeddings of a pass: (tokens, hidden), model dtype."""

    @abstractmethod
    def token_ids(self, step: int, vocab_size: int) -> Tensor:
        """Tokens beside `inputs`, for models that choose experts by token: int32 (tokens,)."""

    @abstractmethod
    def transform(self, step: int) -> LayerTransform | None:
        """What happens after each layer; None: nothing."""

    @property
    def layer_vectors(self) -> Tensor | None:
        """The layers' reflections: (n_layers, hidden). None: `transform` works otherwise."""
        return None

    def route_hashes(self, step: int, moe_layers: range) -> Tensor:
        """Hashes that choose a step's experts in some of the model's layers of experts.

        int64 (layers, n); modulo a layer's number of experts they are `first_experts`.
        """
        raise AssertionError("no step follows")

    def first_experts(self, step: int, moe_layer: int, n_experts: int) -> Tensor | None:
        """Each row's first expert in the m-th MoE layer, int64 (tokens,); None: the gate's."""
        return None

    @abstractmethod
    def take(self, step: int, states: Tensor) -> None:
        """Takes the states of a pass after the final norm: (nonces, positions, hidden)."""

    @property
    def points(self) -> Tensor:
        """The points from which the next step follows: int64 (n,). May be written to."""
        raise AssertionError("no step follows")

    def follow(self, points: Tensor) -> None:
        """Takes the points of the last pass from another device, which took its states."""
        raise AssertionError("no step follows")

    @abstractmethod
    def numbers(self) -> Tensor:
        """Computes the tensors of the nonces' values from normed last states (n, hidden), any
        dtype.
        """

    @abstractmethod
    def values(self, numbers: Tensor) -> list[JsonValue]:
        """One value per nonce, on the host. None: a state was not finite: excluded, not wrong."""


class PrefillBatch(Batch):
    """One forward, of which the last position counts."""

    scheme: PrefillScheme

    def __init__(self, scheme: PrefillScheme, nonces: Sequence[int], reflected: bool) -> None:
        super().__init__(scheme, nonces, None)
        self._transform = scheme if reflected and scheme.transforms_layers else None
        self._numbers: Tensor | None = None

    def inputs(self, step: int) -> Tensor:
        return self.scheme.inputs(self.nonces).view(-1, self.scheme.hidden_size)

    def token_ids(self, step: int, vocab_size: int) -> Tensor:
        return self.scheme.token_ids(self.nonces, vocab_size).view(-1)

    def transform(self, step: int) -> LayerTransform | None:
        return self._transform

    def take(self, step: int, states: Tensor) -> None:
        self._numbers = self.scheme.numbers(self.nonces, states[:, -1])

    def numbers(self) -> Tensor:
        assert self._numbers is not None, "no state was taken"
        return self._numbers

    def values(self, numbers: Tensor) -> list[JsonValue]:
        return self.scheme.values(self.nonces, numbers)
