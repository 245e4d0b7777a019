"""What a proof scheme is to an engine: its inputs, what happens after each layer, its answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import JsonValue
from torch import Tensor

from poc_core.arithmetic import rng
from poc_core.errors import SpecError
from poc_core.records import ProofSpec

_ALL = slice(None)


class Scheme(ABC):
    """One proof scheme, prepared for one spec on one model and device; used for any number of
    batches.

    What an engine does with it depends on which it is, a PrefillScheme or a SteppedScheme.

    Parameters: `hidden_size` of the model, `n_layers` of the whole model (also under pipeline
    parallelism), `device` and `dtype` of its activations. A constructor raises SpecError when it
    cannot follow the spec's options.
    """

    # False: `transform_layer` changes nothing, so an engine need not hook any layer.
    transforms_layers: bool = True
    # True: transforming a sum is transforming its terms, so an engine may transform a layer's
    # hidden_states + residual at once. False: the two must be transformed apart, as the reference
    # does.
    transform_is_linear: ClassVar[bool] = True

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
        )

    def token_ids(self, nonces: Sequence[int], vocab_size: int) -> Tensor:
        """What models that choose experts by token get beside the inputs (protocol.md, section
        2.1): int32 (n, seq_len), on the device.
        """
        spec = self.spec
        return rng.token_ids(
            spec.block_hash, spec.public_key, nonces, spec.seq_len, vocab_size, self.device
        )

    @abstractmethod
    def transform_layer(self, layer: int, x: Tensor) -> Tensor:
        """The output x (..., hidden) of decoder layer `layer` (global index), as a new tensor;
        x stays.
        """

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        """`transform_layer` of each of the tensors (..., hidden) that a layer gave; may use
        their memory.
        """
        return [self.transform_layer(layer, x) for x in terms]

    def _nonce_name(self, nonce: int) -> str:
        return f"{self.spec.block_hash}_{self.spec.public_key}_nonce_{nonce}"


class PrefillScheme(Scheme):
    """A scheme whose values come from the last position's state of one forward."""

    @abstractmethod
    def numbers(self, nonces: Sequence[int], last_hidden: Tensor) -> Tensor:
        """What the nonces' values are made of, on the device, from their last tokens' states
        after the final norm: (n, hidden), any dtype. Queues its work and waits for none. NaN
        marks a nonce whose state is not finite.
        """

    @abstractmethod
    def values(self, nonces: Sequence[int], numbers: Tensor) -> list[JsonValue]:
        """One value per nonce from its numbers, on the host. None: its state is not finite, so
        it is excluded, not wrong.
        """

    def finish(self, nonces: Sequence[int], last_hidden: Tensor) -> list[JsonValue]:
        """Both at once."""
        return self.values(nonces, self.numbers(nonces, last_hidden).cpu()) if nonces else []


class SteppedScheme(Scheme):
    """A scheme whose nonces go on step by step after their prefill."""

    @abstractmethod
    def begin(self, nonces: Sequence[int]) -> "SteppedBatch":
        """A new micro-batch."""


class SteppedBatch(ABC):
    """A micro-batch whose nonces each get `n_steps` further positions after the prefill's.

    Each one's input follows from the state before it. All tensors stay on the device.
    """

    n_steps: int

    @abstractmethod
    def prefill(self, part: slice = _ALL) -> Tensor:
        """The input embeddings of the first seq_len positions: (n, seq_len, hidden), model
        dtype; of some nonces.
        """

    @abstractmethod
    def whole(self) -> Tensor | None:
        """Those of all seq_len + n_steps positions, where they are known beforehand: one causal
        forward does it all.
        """

    @abstractmethod
    def next_inputs(self) -> Tensor:
        """Those of the next step, (n, 1, hidden), from the states taken so far."""

    @abstractmethod
    def take(self, states: Tensor) -> None:
        """States after the final norm, (n, k, hidden), of the next k: the prefill's last
        position, then the steps.
        """

    @property
    @abstractmethod
    def points(self) -> Tensor:
        """What the next step follows from, as the last state taken gave it: int64 (n,). May be
        written to.
        """

    @abstractmethod
    def follow(self, points: Tensor) -> None:
        """Another device has taken the next state, and these are its points."""

    @abstractmethod
    def transform_terms(
        self, layer: int, terms: Sequence[Tensor], part: slice = _ALL
    ) -> list[Tensor]:
        """The outputs (n, positions, hidden) of a decoder layer (global index), transformed;
        may use their memory. Of some nonces.
        """

    @property
    @abstractmethod
    def layer_vectors(self) -> Tensor | None:
        """What `transform_terms` reflects the layers' outputs by: (n_layers, hidden). None: it
        does otherwise.
        """

    @abstractmethod
    def route_hashes(self, moe_layers: int, position: int) -> Tensor:
        """What the first experts at one position follow from in so many layers of experts, the
        first ones of the model: int64 (moe_layers, n); each modulo its layer's number of
        experts is `first_experts`.
        """

    @abstractmethod
    def first_experts(self, moe_layer: int, positions: range, n_experts: int) -> Tensor | None:
        """The first of the experts that serve each position in the m-th layer of experts: int64 (n,
        positions).

        None: the gate chooses.
        """

    @abstractmethod
    def numbers(self) -> Tensor:
        """What the nonces' values are made of, on the device. Queues its work and waits for
        none.
        """

    @abstractmethod
    def values(self, numbers: Tensor) -> list[JsonValue]:
        """One value per nonce from its numbers, on the host. None: a state was not finite, so
        it is excluded.
        """
