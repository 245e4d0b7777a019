"""The proof schemes. Each folder of this package is a scheme, without further registration.

A scheme has two modules. `contract.py` does not import torch. It defines the scheme's requests,
options, payloads, answers and verdicts, and has a `contract.Contract` with the name `CONTRACT`.
`proof.py` imports torch. It computes the scheme's values in engines, and has a subclass of
`base.Scheme` with the name `SCHEME`. README.md has a complete example, `peaks`.
"""

import pkgutil
from functools import cache

from poc_core.errors import SpecError


def scheme_names() -> list[str]:
    """Returns the names of all schemes, which are the valid values of ProofSpec.scheme."""
    return list(_folders_in(tuple(__path__)))


@cache  # each request for a job calls it several times, and listing the folders takes 0.1 ms
def _folders_in(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(path) if module.ispkg))


def known_name(name: str) -> str:
    """Returns `name` if a scheme has this name. SpecError if no scheme has this name."""
    names = scheme_names()
    if name not in names:
        raise SpecError(f"There is no proof scheme {name[:80]!r}; use one of {', '.join(names)}.")
    return name
