"""The proof schemes. Each is a folder of this package; nothing registers it.

A scheme has two halves. `contract.py`, without torch, says what its requests, options, payloads,
answers and verdicts are: its `CONTRACT` is a `contract.Contract`. `proof.py`, with torch, computes
its values for the engines: its `SCHEME` is a subclass of `base.Scheme`. docs/architecture.md shows
a whole one, `peaks`.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from poc_core.errors import SpecError

if TYPE_CHECKING:
    import torch

    from poc_core.records import ProofSpec
    from poc_core.schemes.base import Scheme
    from poc_core.schemes.contract import Contract


def scheme_names() -> list[str]:
    """The names that a ProofSpec's `scheme` may have."""
    return list(_folders_in(tuple(__path__)))


@cache  # a job's request asks several times, and a look into the folders takes 0.1 ms
def _folders_in(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(path) if module.ispkg))


@cache
def contract_of(name: str) -> "Contract":
    """Returns the contract of the scheme with that name. SpecError: there is none."""
    contract: Contract = importlib.import_module(f"{__name__}.{_known(name)}.contract").CONTRACT
    return contract


def contracts() -> list["Contract"]:
    """The contracts of all schemes, in the order of their names."""
    return [contract_of(name) for name in scheme_names()]


def recognised(marks: Mapping[str, Any], candidates: "Sequence[Contract]") -> "Contract":
    """The scheme of a body: one that knows its marks, else one that needs none, else the first."""
    by_marks = (contract for contract in candidates if contract.recognises(marks))
    without = (contract for contract in candidates if not contract.marks)
    return next(by_marks, None) or next(without, candidates[0])


def load_scheme(
    spec: "ProofSpec",
    *,
    hidden_size: int,
    n_layers: int,
    device: "torch.device",
    dtype: "torch.dtype",
) -> "Scheme":
    """The scheme that `spec` names, for a model on a device. SpecError: unknown or bad options."""
    module = importlib.import_module(f"{__name__}.{_known(spec.scheme)}.proof")
    scheme: Scheme = module.SCHEME(
        spec, hidden_size=hidden_size, n_layers=n_layers, device=device, dtype=dtype
    )
    return scheme


def _known(name: str) -> str:
    names = scheme_names()
    if name not in names:
        raise SpecError(f"There is no proof scheme {name[:80]!r}; use one of {', '.join(names)}.")
    return name
