"""Decode proofs computed: chains of points, or how far claimed ones lie off (protocol.md,
section 8).
"""

import logging
from collections.abc import Sequence

import torch
from pydantic import JsonValue
from torch import Tensor

from poc_core.arithmetic import reflections
from poc_core.records import ProofSpec
from poc_core.schemes.base import SteppedBatch, SteppedScheme
from poc_core.schemes.decode import routing, steps
from poc_core.schemes.decode.options import DecodeOptions

logger = logging.getLogger(__name__)

_ALL = slice(None)

# Hashes that the picks of some positions are chosen from at a time.
_CHUNK_KEYS = 1 << 24


class DecodeScheme(SteppedScheme):
    def __init__(
        self,
        spec: ProofSpec,
        *,
        hidden_size: int,
        n_layers: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(
            spec, hidden_size=hidden_size, n_layers=n_layers, device=device, dtype=dtype
        )
        self.options = DecodeOptions.checked(spec, hidden_size)
        self.layer_vectors = reflections.layer_vectors(
            spec.block_hash, n_layers, hidden_size, device, dtype
        )

    def begin(self, nonces: Sequence[int]) -> "DecodeBatch":
        return DecodeBatch(self, nonces)

    def transform_layer(self, layer: int, x: Tensor) -> Tensor:
        return reflections.reflect(x, self.layer_vectors[layer])

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        return reflections.reflect_terms(list(terms), self.layer_vectors[layer])


class DecodeBatch(SteppedBatch):
    def __init__(self, scheme: DecodeScheme, nonces: Sequence[int]) -> None:
        self._scheme = scheme
        self._nonces = nonces
        spec, options, device = scheme.spec, scheme.options, scheme.device
        self.n_steps = options.max_tokens
        self._base = steps.base_seeds(spec.block_hash, spec.public_key, nonces, device)
        self._claims: Tensor | None = None  # int64 (n, T + 1)
        self._wrong_length: list[bool] = [False] * len(nonces)
        if options.enforced is not None:
            claimed = [options.enforced[str(nonce)] for nonce in nonces]
            self._wrong_length = [len(points) != self.n_steps + 1 for points in claimed]
            # What a chain of another length is worth is known; the rest of it only has to be
            # computable.
            padded = [(points + [0] * (self.n_steps + 1))[: self.n_steps + 1] for points in claimed]
            self._claims = torch.tensor(padded, dtype=torch.int64, device=device)
        self._points: list[Tensor] = []  # int64 (n,) of each state taken
        self._margins: list[Tensor] = []  # float32 (n,) of the claims, likewise
        self._own_vectors: dict[int, Tensor] = {}  # by layer: (n, 1, hidden)
        self._route_seeds: dict[int, Tensor] = {}  # by layer of experts: int64 (n, 1)
        self._all_route_seeds: Tensor | None = (
            None  # of the first layers of experts: int64 (layers, n)
        )

    def prefill(self, part: slice = _ALL) -> Tensor:
        return self._scheme.inputs(self._nonces[part])

    def whole(self) -> Tensor | None:
        if self._claims is None or self._scheme.options.stepwise:
            return None
        return torch.cat([self.prefill(), self._inputs_of(range(1, self.n_steps + 1))], dim=1)

    def next_inputs(self) -> Tensor:
        step = len(self._points)
        return self._inputs_of(range(step, step + 1))

    def take(self, states: Tensor) -> None:
        for some in states.split(
            max(1, _CHUNK_KEYS // (len(self._nonces) * self._scheme.hidden_size)), dim=1
        ):
            self._take(some)

    @property
    def points(self) -> Tensor:
        return self._points[-1]

    def follow(self, points: Tensor) -> None:
        self._points.append(points)

    def transform_terms(
        self, layer: int, terms: Sequence[Tensor], part: slice = _ALL
    ) -> list[Tensor]:
        if not self._scheme.options.per_nonce_reflection:
            return self._scheme.transform_terms(layer, terms)
        vectors = self._own_vectors.get(layer)
        if vectors is None:
            block_hash = self._scheme.spec.block_hash
            names = [
                f"{block_hash}_nonce{nonce}_layer_{layer}_householder" for nonce in self._nonces
            ]
            vectors = reflections.householder_vectors(
                names, self._scheme.hidden_size, self._scheme.device
            )
            vectors = self._own_vectors[layer] = vectors.to(self._scheme.dtype)[:, None]
        return [reflections.reflect(x, vectors[part]) for x in terms]

    @property
    def layer_vectors(self) -> Tensor | None:
        return None if self._scheme.options.per_nonce_reflection else self._scheme.layer_vectors

    def route_hashes(self, moe_layers: int, position: int) -> Tensor:
        if self._all_route_seeds is None or len(self._all_route_seeds) != moe_layers:
            self._all_route_seeds = torch.cat(
                [self._seeds_of(layer) for layer in range(moe_layers)], dim=1
            ).T
        return routing.route_hashes(
            self._all_route_seeds, max(0, position - (self._scheme.spec.seq_len - 1))
        )

    def first_experts(self, moe_layer: int, positions: range, n_experts: int) -> Tensor:
        seeds = self._seeds_of(moe_layer)
        places = torch.arange(positions.start, positions.stop, device=seeds.device)
        step = (places - (self._scheme.spec.seq_len - 1)).clamp_(min=0)
        return routing.first_experts(seeds, step[None], n_experts)

    def numbers(self) -> Tensor:
        """float32 (n, T + 1, 1 or 2): each step's point and, where there are claims, the margin
        of the one claimed.
        """
        points = torch.stack(self._points, dim=1).to(torch.float32)
        return torch.stack(
            [points, torch.stack(self._margins, dim=1)] if self._margins else [points], dim=-1
        )

    def values(self, numbers: Tensor) -> list[JsonValue]:
        points = numbers[..., 0].to(torch.int64)
        claims = None if self._claims is None else self._claims.cpu()
        values: list[JsonValue] = []
        for i, nonce in enumerate(self._nonces):
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
            found = routing.route_seeds(
                self._scheme.spec.block_hash, self._nonces, moe_layer, self._scheme.device
            )
            seeds = self._route_seeds[moe_layer] = found[:, None]
        return seeds

    def _take(self, states: Tensor) -> None:
        """(n, k, hidden), of the next k."""
        (n, k, hidden), first = states.shape, len(self._points)
        picks = self._picks_of(range(first, first + k)).view(n * k, -1)
        snap = steps.snap(states.reshape(n * k, hidden), picks)
        self._points += snap.points.view(n, k).unbind(1)
        if self._claims is not None:
            margins = steps.claimed_margins(
                snap.scores, self._claims[:, first : first + k].reshape(-1)
            )
            self._margins += margins.view(n, k).unbind(1)

    def _picks_of(self, passes: range) -> Tensor:
        """Of the prefill (0) and of steps: (n, passes, DIM)."""
        scheme, spec, found = self._scheme, self._scheme.spec, []
        if 0 in passes:
            first = steps.first_picks(
                spec.block_hash, spec.public_key, self._nonces, scheme.hidden_size, scheme.device
            )
            found.append(first[:, None])
        if later := range(max(1, passes.start), passes.stop):
            found.append(
                steps.step_picks(self._base[:, None], *self._which(later), scheme.hidden_size)
            )
        return torch.cat(found, dim=1)

    def _inputs_of(self, which: range) -> Tensor:
        """Of steps: (n, steps, hidden)."""
        scheme = self._scheme
        return steps.step_inputs(
            self._base[:, None], *self._which(which), scheme.hidden_size, scheme.dtype
        )

    def _which(self, which: range) -> tuple[Tensor, Tensor]:
        """The numbers of steps, int64 (steps,), and the points before them, (n, steps): of one
        step or where all are claimed.
        """
        if self._claims is not None:
            before = self._claims[:, which.start - 1 : which.stop - 1]
        else:
            before = torch.stack(self._points[which.start - 1 : which.stop - 1], dim=1)
        return torch.arange(which.start, which.stop, device=before.device), before


SCHEME = DecodeScheme
