"""Caches the proof schemes of an engine, because generating a scheme's vectors takes time."""

from functools import partial

import torch
from cachetools import LRUCache

from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from poc_core.schemes.base import Scheme, load_scheme

# Schemes of a round and a few concurrent jobs. Each holds per-layer vectors (a few MB), and a
# distance scheme also a projection (8192 x hidden float32).
_KEPT = 4


class ReadySchemes:
    """A cache of proof schemes that are prepared for one model, by spec."""

    def __init__(
        self, hidden_size: int, n_layers: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.replicated = True  # True: layers' outputs are equal on all tensor-parallel ranks
        self._load = partial(
            load_scheme, hidden_size=hidden_size, n_layers=n_layers, device=device, dtype=dtype
        )
        self._schemes: LRUCache[str, Scheme] = LRUCache(_KEPT)

    def of(self, spec: ProofSpec) -> Scheme:
        """Returns a spec's proof scheme. SpecError if this deployment cannot compute the scheme."""
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
