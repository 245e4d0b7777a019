"""Computes decode proofs: chains of points, or the margins of claimed chains (section 8).

A point is the index of the codebook entry that is nearest to a hidden state. Each point determines
the input of the next decode step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from pydantic import JsonValue
from torch import Tensor

from poc_core.arithmetic import reflections
from poc_core.records import Passes
from poc_core.schemes.base import Batch, LayerTransform, Scheme
from poc_core.schemes.decode import steps
from poc_core.schemes.decode.options import DecodeOptions, passes_of

logger = logging.getLogger(__name__)

# Hashes computed at a time to choose the dimensions that are read from hidden states.
_CHUNK_KEYS = 1 << 24


class DecodeScheme(Scheme):
    def prepare(self) -> None:
        self.options = DecodeOptions.checked(self.spec, self.hidden_size)
        self.layer_vectors = self.reflections()

    @property
    def passes(self) -> Passes:
        return passes_of(self.spec)

    def begin(
        self, nonces: Sequence[int], part: int | None = None, reflected: bool = True
    ) -> DecodeBatch:
        return DecodeBatch(self, nonces, part)


class DecodeBatch(Batch):
    """A micro-batch of decode proofs: a prefill in one or more parts, then decode steps. If points
    are claimed, one forward pass has all positions, because these points determine all inputs.
    """

    scheme: DecodeScheme
    seeds_experts = True

    def __init__(self, scheme: DecodeScheme, nonces: Sequence[int], part: int | None) -> None:
        super().__init__(scheme, nonces, part)
        spec, options, device = scheme.spec, scheme.options, scheme.device
        self.n_steps = options.max_tokens
        self._base = steps.base_seeds(spec.block_hash, spec.public_key, nonces, device)
        self._claims: Tensor | None = None  # int64 (n, T + 1)
        self._wrong_length: list[bool] = [False] * len(nonces)
        if options.enforced is not None:
            claimed = [options.enforced[str(nonce)] for nonce in nonces]
            self._wrong_length = [len(points) != self.n_steps + 1 for points in claimed]
            # A chain of another length is wrong in any case. Its padding only makes it computable.
            padded = [(points + [0] * (self.n_steps + 1))[: self.n_steps + 1] for points in claimed]
            self._claims = torch.tensor(padded, dtype=torch.int64, device=device)
        self._first_states: list[Tensor] = []  # last hidden states of the prefill's parts
        self._points: list[Tensor] = []  # int64 (n,) for each position computed
        self._margins: list[Tensor] = []  # of claims: float32 (n,) for each position computed
        self._nonce_vectors: dict[int, Tensor] = {}  # by layer: (n, 1, hidden)
        self._route_seeds: dict[int, Tensor] = {}  # by MoE layer: int64 (n, 1)
        # By MoE layers: int64 (layers, n)
        self._all_route_seeds: dict[range, Tensor] = {}

    def inputs(self, step: int) -> Tensor:
        if self.order.is_step(step):
            t = len(self._points)
            rows = self._inputs_of(range(t, t + 1))
        else:
            rows = self.scheme.inputs(self.nonces[self._slice(step)])
            if not self.order.shape.steps:  # the steps' points are claimed
                rows = torch.cat([rows, self._inputs_of(range(1, self.n_steps + 1))], dim=1)
        return rows.reshape(-1, self.scheme.hidden_size)

    def token_ids(self, step: int, vocab_size: int) -> Tensor:
        if self.order.is_step(step):
            t = len(self._points)
            ids = self._token_ids_of(range(t, t + 1), vocab_size)
        else:
            ids = self.scheme.token_ids(self.nonces[self._slice(step)], vocab_size)
            if not self.order.shape.steps:  # the steps' points are claimed
                later = self._token_ids_of(range(1, self.n_steps + 1), vocab_size)
                ids = torch.cat([ids, later], dim=1)
        return ids.reshape(-1)

    def take(self, step: int, states: Tensor) -> None:
        if self.order.is_step(step):
            self._take(states)
        elif not self.order.shape.steps:  # with claims the pass includes the steps' positions
            self._take(states[:, -1 - self.n_steps :])
        else:
            self._first_states.append(states[:, -1:])
            if step == self.order.n_parts - 1:
                self._take(torch.cat(self._first_states))
                self._first_states.clear()

    @property
    def points(self) -> Tensor:
        return self._points[-1]

    def follow(self, points: Tensor) -> None:
        self._points.append(points)

    def transform(self, step: int) -> LayerTransform:
        """Returns the reflections of layers' outputs, which decode proofs use in every model."""
        if not self.scheme.options.per_nonce_reflection:
            return self.scheme
        return _OfEachNonce(self, self._slice(step))

    def nonce_vectors(self, layer: int) -> Tensor:
        """Returns the vector that reflects each nonce's outputs of a layer: (n, 1, hidden)."""
        vectors = self._nonce_vectors.get(layer)
        if vectors is None:
            block_hash = self.scheme.spec.block_hash
            names = [f"{block_hash}_nonce{one}_layer_{layer}_householder" for one in self.nonces]
            vectors = reflections.householder_vectors(
                names, self.scheme.hidden_size, self.scheme.device
            )
            vectors = self._nonce_vectors[layer] = vectors.to(self.scheme.dtype)[:, None]
        return vectors

    @property
    def layer_vectors(self) -> Tensor | None:
        return None if self.scheme.options.per_nonce_reflection else self.scheme.layer_vectors

    def route_hashes(self, step: int, moe_layers: range) -> Tensor:
        if moe_layers not in self._all_route_seeds:
            seeds = [self._seeds_of(layer) for layer in moe_layers]
            self._all_route_seeds[moe_layers] = torch.cat(seeds, dim=1).T
        t = self.order.positions(step).start - (self.scheme.spec.seq_len - 1)
        return steps.route_hashes(self._all_route_seeds[moe_layers], max(0, t))

    def first_experts(self, step: int, moe_layer: int, n_experts: int) -> Tensor:
        seeds, positions = self._seeds_of(moe_layer), self.order.positions(step)
        places = torch.arange(positions.start, positions.stop, device=seeds.device)
        numbers = (places - (self.scheme.spec.seq_len - 1)).clamp_(min=0)
        first = steps.first_experts(seeds, numbers[None], n_experts)
        return first[self._slice(step)].reshape(-1)

    def numbers(self) -> Tensor:
        """Returns the points, and margins if points are claimed: float32 (n, T + 1, 1 or 2)."""
        parts = [torch.stack(self._points, dim=1).to(torch.float32)]
        if self._margins:
            parts.append(torch.stack(self._margins, dim=1))
        return torch.stack(parts, dim=-1)

    def values(self, numbers: Tensor) -> list[JsonValue]:
        points = numbers[..., 0].to(torch.int64)
        claims = None if self._claims is None else self._claims.cpu()
        values: list[JsonValue] = []
        for i, nonce in enumerate(self.nonces):
            if (points[i] == steps.NO_POINT).any():
                logger.warning("nonce %d excluded: one of its hidden states is not finite", nonce)
                values.append(None)
            elif claims is None:
                values.append(points[i].tolist())
            elif self._wrong_length[i]:
                values.append([self.n_steps + 1, steps.NO_POINT_MARGIN])
            else:
                wrong = points[i] != claims[i]
                values.append(
                    [int(wrong.sum()), float(numbers[i, wrong, 1].max()) if wrong.any() else 0.0]
                )
        return values

    def _seeds_of(self, moe_layer: int) -> Tensor:
        seeds = self._route_seeds.get(moe_layer)
        if seeds is None:
            found = steps.route_seeds(
                self.scheme.spec.block_hash, self.nonces, moe_layer, self.scheme.device
            )
            seeds = self._route_seeds[moe_layer] = found[:, None]
        return seeds

    def _slice(self, step: int) -> slice:
        members = self.order.members(step)
        return slice(members.start, members.stop)

    def _take(self, states: Tensor) -> None:
        """Stores the points, and margins if points are claimed, of states (n, k, hidden)."""
        k = max(1, _CHUNK_KEYS // (len(self.nonces) * self.scheme.hidden_size))
        for some in states.split(k, dim=1):
            self._take_some(some)

    def _take_some(self, states: Tensor) -> None:
        (n, k, hidden), first = states.shape, len(self._points)
        picks = self._picks_of(range(first, first + k)).view(n * k, -1)
        snap = steps.snap(states.reshape(n * k, hidden), picks)
        self._points += snap.points.view(n, k).unbind(1)
        if self._claims is not None:
            claims = self._claims[:, first : first + k].reshape(-1)
            margins = steps.claimed_margins(snap.scores, claims)
            self._margins += margins.view(n, k).unbind(1)

    def _picks_of(self, passes: range) -> Tensor:
        """Returns the dimensions to read of each state: int64 (n, passes, DIM). Pass 0: prefill."""
        scheme, spec, found = self.scheme, self.scheme.spec, []
        if 0 in passes:
            first = steps.first_picks(
                spec.block_hash, spec.public_key, self.nonces, scheme.hidden_size, scheme.device
            )
            found.append(first[:, None])
        if later := range(max(1, passes.start), passes.stop):
            found.append(
                steps.step_picks(self._base[:, None], *self._which(later), scheme.hidden_size)
            )
        return torch.cat(found, dim=1)

    def _inputs_of(self, which: range) -> Tensor:
        """Returns the input embeddings of the steps `which`: (n, steps, hidden)."""
        scheme = self.scheme
        return steps.step_inputs(
            self._base[:, None], *self._which(which), scheme.hidden_size, scheme.dtype
        )

    def _token_ids_of(self, which: range, vocab_size: int) -> Tensor:
        return steps.step_token_ids(self._base[:, None], *self._which(which), vocab_size)

    def _which(self, which: range) -> tuple[Tensor, Tensor]:
        """Returns the numbers of the steps `which`, and the point before each step: (n, steps)."""
        if self._claims is not None:
            before = self._claims[:, which.start - 1 : which.stop - 1]
        else:
            before = torch.stack(self._points[which.start - 1 : which.stop - 1], dim=1)
        return torch.arange(which.start, which.stop, device=before.device), before


class _OfEachNonce:
    """A transformation that reflects the outputs of each nonce by the nonce's own vectors."""

    def __init__(self, batch: DecodeBatch, members: slice) -> None:
        self.hidden_size = batch.scheme.hidden_size
        self._batch = batch
        self._members = members

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        vectors = self._batch.nonce_vectors(layer)[self._members]
        return [
            reflections.reflect(x.reshape(len(vectors), -1, x.shape[-1]), vectors).reshape(x.shape)
            for x in terms
        ]


SCHEME = DecodeScheme
