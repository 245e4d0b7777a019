"""The schemes that an engine computes now: made once, as their vectors take a while."""

from __future__ import annotations

from functools import partial

import torch
from cachetools import LRUCache

from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from poc_core.schemes import load_scheme
from poc_core.schemes.base import Scheme

# A round and a few jobs beside it. Each holds per-layer vectors (a few MB), a distance scheme also
# its projection (8192 x hidden float32).
_KEPT = 4


class ReadySchemes:
    """Cache of one model's schemes by spec."""

    def __init__(
        self, hidden_size: int, n_layers: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.replicated = True  # whether layers give the same on all tensor-parallel ranks
        self._load = partial(
            load_scheme, hidden_size=hidden_size, n_layers=n_layers, device=device, dtype=dtype
        )
        self._schemes: LRUCache[str, Scheme] = LRUCache(_KEPT)

    def of(self, spec: ProofSpec) -> Scheme:
        """A spec's scheme. SpecError: see load_scheme, or this deployment cannot compute it."""
        key = spec.model_dump_json()
        scheme = self._schemes.get(key)
        if scheme is None:
            scheme = self._schemes[key] = self._load(spec)
        if not self.replicated and scheme.transforms_layers and not scheme.transform_is_linear:
            raise SpecError(
                "This model's layers leave parts of a sum on each tensor-parallel rank, so a scheme"
                " that divides their outputs by a norm cannot be computed; use sign_flips, or"
                " tensor_parallel 1."
            )
        return scheme
