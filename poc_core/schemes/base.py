"""The interface between schemes and engines: inputs, transformations of layers, values."""

from __future__ import annotations

import importlib
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
from poc_core.schemes import known_name


class LayerTransform(Protocol):
    """A transformation of the layers' outputs. Each Scheme is a LayerTransform."""

    hidden_size: int

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """Returns the transformed output tensors (..., hidden) of a layer. May change `terms`.

        `layer`: the layer's index in the complete model.
        """


class Scheme(ABC):
    """A proof scheme, prepared for one spec, model and device; all batches of the spec share it.

    `hidden_size`, `n_layers`: of the complete model, also under pipeline parallelism. `device`,
    `dtype`: of the model's activations. SpecError: see `prepare`.
    """

    # False if `transform_layer` changes nothing, so engines need no hooks.
    transforms_layers: bool = True
    # True if the transformation is linear, so an engine may transform the sum of a layer's
    # hidden_states and residual. False if both are transformed separately, as in the reference.
    transform_is_linear: ClassVar[bool] = True
    # True if inputs are seeded with all eight words of the digest (rng.inputs).
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
        """Computes the data that all batches share. SpecError if the spec's options are invalid."""
        return

    def reflections(self) -> Tensor:
        """Returns the vectors that reflect the layers' outputs, see reflections.layer_vectors."""
        return layer_vectors(
            self.spec.block_hash, self.n_layers, self.hidden_size, self.device, self.dtype
        )

    @property
    def passes(self) -> Passes:
        """The forward passes of each nonce, see Contract.passes."""
        return Passes(self.spec.seq_len)

    @abstractmethod
    def begin(
        self, nonces: Sequence[int], part: int | None = None, reflected: bool = True
    ) -> Batch:
        """Returns a new micro-batch of these nonces.

        `part`: the number of nonces of one forward; None for all nonces. `reflected`: True if the
        network transforms the layers of this model in prefills.
        """

    def inputs(self, nonces: Sequence[int]) -> Tensor:
        """Returns the input embeddings: (n, seq_len, hidden), model dtype, on the device."""
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
        """Returns the token ids for models that route by token (protocol.md, 2.1): int32 (n,
        seq_len).
        """
        spec = self.spec
        return rng.token_ids(
            spec.block_hash, spec.public_key, nonces, spec.seq_len, vocab_size, self.device
        )

    @abstractmethod
    def transform_layer(self, layer: int, x: Tensor) -> Tensor:
        """Returns the transformed output x (..., hidden) of a layer, as a new tensor.

        `layer`: the layer's index in the complete model.
        """

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """Returns the transformed output tensors, see LayerTransform."""
        return [self.transform_layer(layer, x) for x in terms]

    def _nonce_name(self, nonce: int) -> str:
        return f"{self.spec.block_hash}_{self.spec.public_key}_nonce_{nonce}"


class PrefillScheme(Scheme):
    """A scheme with one forward, whose values are computed from the state of the last position."""

    def begin(
        self, nonces: Sequence[int], part: int | None = None, reflected: bool = True
    ) -> Batch:
        return PrefillBatch(self, nonces, reflected)

    @abstractmethod
    def numbers(self, nonces: Sequence[int], last_hidden: Tensor) -> Tensor:
        """Computes the tensor of the nonces' values, from their last states after the final norm
        (n, hidden).

        Does not wait for the device. NaN marks a nonce whose state is not finite.
        """

    @abstractmethod
    def values(self, nonces: Sequence[int], numbers: Tensor) -> list[JsonValue]:
        """Returns each nonce's value from `numbers` (on the CPU); None for an excluded nonce, whose
        state is not finite.
        """

    def finish(self, nonces: Sequence[int], last_hidden: Tensor) -> list[JsonValue]:
        """Returns the `values` of the `numbers`."""
        return self.values(nonces, self.numbers(nonces, last_hidden).cpu()) if nonces else []


class Batch(ABC):
    """A micro-batch of one scheme: the inputs and results of each pass.

    All tensors are on the device, and no method waits for the device. `step`: a pass's number in
    `order`.
    """

    seeds_experts: ClassVar[bool] = False

    def __init__(self, scheme: Scheme, nonces: Sequence[int], part: int | None) -> None:
        """`part`: the number of nonces of one forward; None for all nonces."""
        self.scheme = scheme
        self.nonces = nonces
        self.order = PassOrder(len(nonces), part or len(nonces), scheme.passes)

    @abstractmethod
    def inputs(self, step: int) -> Tensor:
        """Returns the embeddings of a pass: (tokens, hidden), model dtype."""

    @abstractmethod
    def token_ids(self, step: int, vocab_size: int) -> Tensor:
        """Returns the token ids of a pass, for models that route by token: int32 (tokens,)."""

    @abstractmethod
    def transform(self, step: int) -> LayerTransform | None:
        """Returns the transformation of the layers' outputs in a pass; None if there is none."""

    @property
    def layer_vectors(self) -> Tensor | None:
        """The layers' reflections: (n_layers, hidden); None if `transform` does not use them."""
        return None

    def route_hashes(self, step: int, moe_layers: range) -> Tensor:
        """Returns the hashes that choose a step's experts in some MoE layers: int64 (layers, n).

        A hash modulo the number of experts is a nonce's first expert (see `first_experts`).
        """
        raise AssertionError("no step follows")

    def first_experts(self, step: int, moe_layer: int, n_experts: int) -> Tensor | None:
        """Returns each token's first expert in an MoE layer: int64 (tokens,).

        Returns None if the layer's gate chooses the experts. `moe_layer`: index among MoE layers.
        """
        return None

    @abstractmethod
    def take(self, step: int, states: Tensor) -> None:
        """Takes the states of a pass after the final norm: (nonces, positions, hidden)."""

    @property
    def points(self) -> Tensor:
        """The results of the last pass, which determine the next step: int64 (n,). Callers may
        write to this tensor.
        """
        raise AssertionError("no step follows")

    def follow(self, points: Tensor) -> None:
        """Takes the `points` of the last pass, which another device has computed."""
        raise AssertionError("no step follows")

    @abstractmethod
    def numbers(self) -> Tensor:
        """Computes the tensor of the nonces' values from the states of all passes."""

    @abstractmethod
    def values(self, numbers: Tensor) -> list[JsonValue]:
        """Returns each nonce's value from `numbers` (on the CPU); None for an excluded nonce, whose
        states are not finite.
        """


class PrefillBatch(Batch):
    """A micro-batch of a PrefillScheme."""

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


def load_scheme(
    spec: ProofSpec,
    *,
    hidden_size: int,
    n_layers: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Scheme:
    """Returns the spec's scheme for a model and a device. SpecError if the spec is invalid."""
    module = importlib.import_module(f"{__package__}.{known_name(spec.scheme)}.proof")
    scheme: Scheme = module.SCHEME(
        spec, hidden_size=hidden_size, n_layers=n_layers, device=device, dtype=dtype
    )
    return scheme
