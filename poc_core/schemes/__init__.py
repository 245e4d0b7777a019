"""The proof schemes. Each folder of this package is a scheme, without further registration.

A scheme has two halves. `contract.py`, without torch, defines its requests, options, payloads,
answers and verdicts; its `CONTRACT` is a `contract.Contract`. `proof.py`, with torch, computes its
values for the engines; its `SCHEME` is a subclass of `base.Scheme`. README.md has a complete
example, `peaks`.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from poc_core.errors import SpecError

if TYPE_CHECKING:
    from poc_core.schemes.contract import Contract


def scheme_names() -> list[str]:
    """Returns the names of all schemes, which are the valid values of ProofSpec.scheme."""
    return list(_folders_in(tuple(__path__)))


@cache  # each request for a job calls it several times, and listing the folders takes 0.1 ms
def _folders_in(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(path) if module.ispkg))


@cache
def contract_of(name: str) -> "Contract":
    """Returns the contract of a scheme. SpecError if there is no scheme with that name."""
    contract: Contract = importlib.import_module(f"{__name__}.{known_name(name)}.contract").CONTRACT
    return contract


def contracts() -> list["Contract"]:
    """Returns the contracts of all schemes, ordered by name."""
    return [contract_of(name) for name in scheme_names()]


def recognised(marks: Mapping[str, Any], candidates: "Sequence[Contract]") -> "Contract":
    """Returns the contract of a body: the candidate that recognises the body's marks.

    If none does, returns a candidate without marks, or else the first candidate.
    """
    by_marks = (contract for contract in candidates if contract.recognises(marks))
    without = (contract for contract in candidates if not contract.marks)
    return next(by_marks, None) or next(without, candidates[0])


def known_name(name: str) -> str:
    """Returns the name of a scheme. SpecError if there is no scheme with that name."""
    names = scheme_names()
    if name not in names:
        raise SpecError(f"There is no proof scheme {name[:80]!r}; use one of {', '.join(names)}.")
    return name
