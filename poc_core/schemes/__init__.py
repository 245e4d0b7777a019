"""The proof schemes. Each folder of this package is a scheme, without further registration.

A scheme has two modules. `contract.py` does not import torch. It defines the scheme's requests,
options, payloads, answers and verdicts, and has a `contract.Contract` with the name `CONTRACT`.
`proof.py` imports torch. It computes the scheme's values in engines, and has a subclass of
`base.Scheme` with the name `SCHEME`. README.md has a complete example, `peaks`.
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
    """Returns the contract of the scheme to which a request body belongs: the first candidate that
    recognises the body.

    If no candidate recognises the body, returns the first candidate without `Contract.marks`, or
    else the first candidate. `marks`: the fields of the body that identify schemes, see
    `Contract.recognises`.
    """
    by_marks = (contract for contract in candidates if contract.recognises(marks))
    without = (contract for contract in candidates if not contract.marks)
    return next(by_marks, None) or next(without, candidates[0])


def known_name(name: str) -> str:
    """Returns `name` if a scheme has this name. SpecError if no scheme has this name."""
    names = scheme_names()
    if name not in names:
        raise SpecError(f"There is no proof scheme {name[:80]!r}; use one of {', '.join(names)}.")
    return name
