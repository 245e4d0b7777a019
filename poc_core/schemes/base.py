"""The interface between schemes and engines: inputs, transformations of layers' outputs, values."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from pydantic import JsonValue
from torch import Tensor

from poc_core import records
from poc_core.arithmetic import reflections, rng
from poc_core.errors import SpecError
from poc_core.schemes import known_name


class LayerTransform(Protocol):
    """A transformation of decoder layers' outputs. Each Scheme is a LayerTransform."""

    hidden_size: int

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """Returns the transformed output tensors of a layer, such as hidden_states and residual.
        May overwrite `terms`. `layer`: the index in the complete model.
        """


class Scheme(ABC):
    """A proof scheme, prepared for one spec, model and device. All batches of the spec share it.

    `hidden_size`, `n_layers`: sizes of the complete model. `device`, `dtype`: of the model's
    activations. SpecError if seq_len or an option is invalid.
    """

    # False if layers' outputs stay as they are, so engines need no hooks.
    transforms_layers: bool = True
    # The vectors that reflect the layers' outputs. `prepare` sets them, if the scheme needs any.
    layer_vectors: Tensor
    # True if the transformation is linear, so an engine may transform the sum of a layer's
    # hidden_states and residual. False if both are transformed separately, as in the reference.
    transform_is_linear: ClassVar[bool] = True
    # True if inputs are seeded with all eight words of the digest (rng.inputs).
    stronger_rng: bool = False

    def __init__(
        self,
        spec: records.ProofSpec,
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
        """Computes what all batches of the spec have in common. Raises SpecError if an option is
        invalid.
        """
        return

    def reflections(self) -> Tensor:
        """Returns the vector that reflects each layer's output: (n_layers, hidden)."""
        return reflections.layer_vectors(
            self.spec.block_hash, self.n_layers, self.hidden_size, self.device, self.dtype
        )

    @property
    def passes(self) -> records.Passes:
        """The forward passes that the model runs for each nonce, see Contract.passes."""
        return records.Passes(self.spec.seq_len)

    @abstractmethod
    def begin(
        self, nonces: Sequence[int], part: int | None = None, reflected: bool = True
    ) -> Batch:
        """Returns a new micro-batch. `part`: most nonces of a prefill's forward pass; None means
        all. `reflected`: True if the network's nodes transform this model's layers in prefills.
        """

    def inputs(self, nonces: Sequence[int]) -> Tensor:
        """Returns the prefills' input embeddings: (n, seq_len, hidden), in the model's dtype."""
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
        """Returns the prefills' token ids, which some MoE routers read: int32 (n, seq_len)."""
        spec = self.spec
        return rng.token_ids(
            spec.block_hash, spec.public_key, nonces, spec.seq_len, vocab_size, self.device
        )

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """Returns the reflected output tensors of a layer, see LayerTransform.transform_terms."""
        return reflections.reflect_terms(list(terms), self.layer_vectors[layer])

    def _nonce_name(self, nonce: int) -> str:
        return f"{self.spec.block_hash}_{self.spec.public_key}_nonce_{nonce}"


class PrefillScheme(Scheme):
    """A scheme with one forward pass. A nonce's value depends on the state at the last position."""

    def begin(
        self, nonces: Sequence[int], part: int | None = None, reflected: bool = True
    ) -> Batch:
        return PrefillBatch(self, nonces, reflected)

    @abstractmethod
    def numbers(self, nonces: Sequence[int], last_hidden: Tensor) -> Tensor:
        """Returns the nonces' values as a tensor with n rows, without waiting for the device.
        `last_hidden`: (n, hidden), after the final norm. A row is NaN if its state is not finite;
        the nonce is then excluded.
        """

    @abstractmethod
    def values(self, nonces: Sequence[int], numbers: Tensor) -> list[JsonValue]:
        """Converts `numbers` (on the CPU) to each nonce's JSON value; None for excluded nonces."""

    def finish(self, nonces: Sequence[int], last_hidden: Tensor) -> list[JsonValue]:
        """Computes the JSON value of each nonce (see `numbers`). Waits for the device."""
        return self.values(nonces, self.numbers(nonces, last_hidden).cpu()) if nonces else []


class Batch(ABC):
    """A micro-batch: nonces of one scheme, with the inputs and results of each forward pass.

    All tensors are on the device, except the argument of `values`. No method except `values` waits
    for the device. The argument `step` of a method is the number of a forward pass, see PassOrder.
    """

    seeds_experts: ClassVar[bool] = False

    def __init__(self, scheme: Scheme, nonces: Sequence[int], part: int | None) -> None:
        """`part`: the most nonces of a prefill's forward pass; None means all nonces."""
        self.scheme = scheme
        self.nonces = nonces
        self.order = records.PassOrder(len(nonces), part or len(nonces), scheme.passes)

    @abstractmethod
    def inputs(self, step: int) -> Tensor:
        """Returns a forward pass's input embeddings: (tokens, hidden), in the model's dtype."""

    @abstractmethod
    def token_ids(self, step: int, vocab_size: int) -> Tensor:
        """Returns the token ids that some MoE routers read in a forward pass: int32 (tokens,)."""

    @abstractmethod
    def transform(self, step: int) -> LayerTransform | None:
        """Returns how a forward pass transforms layers' outputs; None if it does not."""

    @property
    def layer_vectors(self) -> Tensor | None:
        """The vector by which decode steps reflect each layer's output: (n_layers, hidden). None if
        the vectors differ between nonces, or the scheme has no decode steps.
        """
        return None

    def route_hashes(self, step: int, moe_layers: range) -> Tensor:
        """Returns a hash for each MoE layer and nonce in one step: int64 (layers, n). The hash
        modulo the number of experts is the index of the nonce's first expert. `moe_layers`: indices
        among the model's MoE layers with seeded experts.
        """
        raise AssertionError("no step follows")

    def first_experts(self, step: int, moe_layer: int, n_experts: int) -> Tensor | None:
        """Returns the index of each token's first expert in an MoE layer: int64 (tokens,). Its
        other experts have the next indices. None if the layer's router chooses the experts.
        `moe_layer`: as in `route_hashes`.
        """
        return None

    @abstractmethod
    def take(self, step: int, states: Tensor) -> None:
        """Stores the states of a forward pass, after the final norm: (n, positions, hidden)."""

    @property
    def points(self) -> Tensor:
        """The point (index in the codebook) of each nonce from the last forward pass: int64 (n,).
        Points determine the inputs of the next step. Callers may overwrite the tensor.
        """
        raise AssertionError("no step follows")

    def follow(self, points: Tensor) -> None:
        """Stores `points`, which another pipeline stage computed in the last forward pass."""
        raise AssertionError("no step follows")

    @abstractmethod
    def numbers(self) -> Tensor:
        """Returns the nonces' values as a tensor with n rows, after the last forward pass."""

    @abstractmethod
    def values(self, numbers: Tensor) -> list[JsonValue]:
        """Converts `numbers` (on the CPU) to each nonce's JSON value; None for excluded nonces."""


class PrefillBatch(Batch):
    """A micro-batch of a PrefillScheme, with one forward pass."""

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
    spec: records.ProofSpec,
    *,
    hidden_size: int,
    n_layers: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Scheme:
    """Returns the scheme of `spec`, prepared (see Scheme). SpecError if the spec is invalid."""
    module = importlib.import_module(f"{__package__}.{known_name(spec.scheme)}.proof")
    scheme: Scheme = module.SCHEME(
        spec, hidden_size=hidden_size, n_layers=n_layers, device=device, dtype=dtype
    )
    return scheme
