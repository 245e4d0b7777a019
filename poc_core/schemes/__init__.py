"""The proof schemes. Each is a folder of this package; nothing registers it.

A scheme's `proof.py` computes its values: with torch, for the engines. Its `SCHEME` is a subclass of `base.Scheme`.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING

from poc_core.errors import SpecError

if TYPE_CHECKING:
    import torch

    from poc_core.records import ProofSpec
    from poc_core.schemes.base import Scheme


def scheme_names() -> list[str]:
    """The names that a ProofSpec's `scheme` may have."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def load_scheme(
    spec: "ProofSpec", *, hidden_size: int, n_layers: int, device: "torch.device", dtype: "torch.dtype"
) -> "Scheme":
    """The scheme that `spec` names, ready for a model on a device. SpecError: unknown scheme or options."""
    names = scheme_names()
    if spec.scheme not in names:
        raise SpecError(f"There is no proof scheme {spec.scheme[:80]!r}; use one of {', '.join(names)}.")
    module = importlib.import_module(f"{__name__}.{spec.scheme}.proof")
    scheme: Scheme = module.SCHEME(spec, hidden_size=hidden_size, n_layers=n_layers, device=device, dtype=dtype)
    return scheme
