"""Computes distance proofs: distances of projected states to a target (protocol.md, section 3)."""

import logging
from collections.abc import Sequence

import torch
from pydantic import JsonValue
from torch import Tensor

from poc_core.arithmetic import reflections, rng
from poc_core.schemes.base import PrefillScheme
from poc_core.schemes.distance.options import DistanceOptions

logger = logging.getLogger(__name__)

# Dimensions of the projection and of the target.
OUTPUT_DIM = 8192
# Standard deviation of the projection's entries.
_PROJECTION_STD = 0.02
# Reflections before the projection, specific to each nonce.
_N_REFLECTIONS = 8


class DistanceScheme(PrefillScheme):
    # Dividing by the norm is not linear; vLLM's hidden_states and residual have different norms.
    transform_is_linear = False

    def prepare(self) -> None:
        options = DistanceOptions.checked(self.spec, self.hidden_size)
        self.transforms_layers = options.randomization == "layer_hooks"
        if self.transforms_layers:
            self.layer_vectors = self.reflections()
        self.projection = projection(self.spec.block_hash, self.hidden_size, self.device)
        self.target = target(self.spec.block_hash, self.device)

    def transform_terms(self, layer: int, terms: Sequence[Tensor]) -> list[Tensor]:
        units = [x / (x.norm(dim=-1, keepdim=True) + 1e-8) for x in terms]
        return [reflections.reflect(x, self.layer_vectors[layer]) for x in units]

    def numbers(self, nonces: Sequence[int], last_hidden: Tensor) -> Tensor:
        x = last_hidden.to(torch.float32)
        finite = torch.isfinite(x).all(-1)
        if not self.transforms_layers:
            x = x * self.signs(nonces)
        x = x / (x.norm(dim=-1, keepdim=True) + 1e-8)
        vectors = self.nonce_vectors(nonces)  # (n, 8, hidden)
        for r in range(_N_REFLECTIONS):
            x = reflections.reflect(x, vectors[:, r])
        y = x @ self.projection.T  # (n, OUTPUT_DIM)
        y = y / y.norm(dim=-1, keepdim=True)
        return torch.where(finite, (y - self.target).norm(dim=-1), torch.nan)  # float32 (n,)

    def values(self, nonces: Sequence[int], numbers: Tensor) -> list[JsonValue]:
        values: list[JsonValue] = []
        for nonce, distance in zip(nonces, numbers.tolist(), strict=True):
            if distance != distance:
                logger.warning("nonce %d excluded: its last hidden state is not finite", nonce)
                distance = None
            values.append(distance)
        return values

    def signs(self, nonces: Sequence[int]) -> Tensor:
        """Returns a sign (+1 or -1) for each dimension of a nonce's state: float32 (n, hidden)."""
        seeds = [rng.seed_from_string(f"{self._nonce_name(nonce)}_signs") for nonce in nonces]
        return torch.where(rng.uniform(seeds, self.hidden_size, self.device) > 0.5, 1.0, -1.0)

    def nonce_vectors(self, nonces: Sequence[int]) -> Tensor:
        """Returns the 8 vectors that reflect each nonce's state: float32 (n, 8, hidden)."""
        names = [
            f"{self._nonce_name(nonce)}_hidden_r{r}"
            for nonce in nonces
            for r in range(_N_REFLECTIONS)
        ]
        vectors = reflections.householder_vectors(names, self.hidden_size, self.device)
        return vectors.view(len(nonces), _N_REFLECTIONS, self.hidden_size)


def projection(block_hash: str, hidden: int, device: torch.device) -> Tensor:
    """Returns the projection matrix W of this block hash: float32 (OUTPUT_DIM, hidden)."""
    seed = rng.seed_from_string(f"{block_hash}_lm_head")
    return (
        rng.normal([seed], OUTPUT_DIM * hidden, device)
        .view(OUTPUT_DIM, hidden)
        .mul_(_PROJECTION_STD)
    )


def target(block_hash: str, device: torch.device) -> Tensor:
    """Returns the unit vector to which distances are measured: float32 (OUTPUT_DIM,)."""
    return reflections.householder_vectors([f"{block_hash}_target"], OUTPUT_DIM, device)[0]


SCHEME = DistanceScheme
