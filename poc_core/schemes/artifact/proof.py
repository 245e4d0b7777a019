"""Computes artifact proofs: k_dim numbers of the last hidden state (protocol.md, section 2)."""

import logging
from collections.abc import Sequence

import torch
from pydantic import JsonValue
from torch import Tensor

from poc_core.arithmetic import reflections, rng
from poc_core.schemes.artifact import encoding
from poc_core.schemes.artifact.options import ArtifactOptions
from poc_core.schemes.base import PrefillScheme

logger = logging.getLogger(__name__)

# Elements of rotation vectors generated at a time, 4 bytes each; enough for all at the usual k_dim.
_ROTATION_ELEMENTS = 1 << 23


class ArtifactScheme(PrefillScheme):
    def prepare(self) -> None:
        options = ArtifactOptions.checked(self.spec, self.hidden_size)
        self.k_dim = options.k_dim
        self.stronger_rng = options.stronger_rng
        self.layer_vectors = self.reflections()

    def numbers(self, nonces: Sequence[int], last_hidden: Tensor) -> Tensor:
        x = last_hidden.to(torch.float32)
        finite = torch.isfinite(x).all(-1, keepdim=True)
        x = x / (x.norm(dim=-1, keepdim=True) + 1e-8)
        y = self.rotate(nonces, x.gather(1, self.pick(nonces)))
        y = y / (y.norm(dim=-1, keepdim=True) + 1e-8)
        return torch.where(finite, y, torch.nan)  # float32 (n, k_dim)

    def values(self, nonces: Sequence[int], numbers: Tensor) -> list[JsonValue]:
        values: list[JsonValue] = list(encoding.encode_vectors(numbers.numpy()))
        for i in numbers.isnan().any(-1).nonzero()[:, 0].tolist():
            logger.warning("nonce %d excluded: its last hidden state is not finite", nonces[i])
            values[i] = None
        return values

    def pick(self, nonces: Sequence[int]) -> Tensor:
        """Returns which dimensions of each state are read (section 2.4): int64 (n, k_dim)."""
        seeds = [
            rng.seed_from_string(f"{self._nonce_name(nonce)}_pick_{self.k_dim}") for nonce in nonces
        ]
        return rng.smallest_hashes(seeds, self.hidden_size, self.k_dim, self.device)

    def rotate(self, nonces: Sequence[int], y: Tensor) -> Tensor:
        """Rotates each row of y (n, k_dim) by the reflections of its nonce (section 2.5)."""
        k_dim = self.k_dim
        step = max(1, _ROTATION_ELEMENTS // (len(nonces) * k_dim))
        for low in range(0, k_dim - 1, step):
            high = min(k_dim - 1, low + step)
            seeds = [
                rng.seed_from_string(f"{self._nonce_name(nonce)}_haar_hh_{k_dim}_{j}")
                for nonce in nonces
                for j in range(low, high)
            ]
            v = rng.normal(seeds, k_dim, self.device)
            v = (v / (v.norm(dim=-1, keepdim=True) + 1e-30)).view(len(nonces), high - low, k_dim)
            for j in range(high - low):
                y = reflections.reflect(y, v[:, j])
        return y


SCHEME = ArtifactScheme
