"""Prints Proofline's requirements, one a line: `python3 scripts/requirements.py [EXTRA...]`.

An image installs the requirements in a separate layer, which changes of our code do not affect.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
OWN_EXTRA = re.compile(r"proofline\[([\w-]+)\]")


def extra(name: str) -> list[str]:
    """Returns the requirements of an extra and of extras within it. KeyError: no such extra."""
    found: list[str] = []
    for requirement in _project()["optional-dependencies"][name]:
        own = OWN_EXTRA.fullmatch(requirement)
        found += extra(own[1]) if own else [requirement]
    return found


def requirements(extras: list[str]) -> list[str]:
    """Returns the project's dependencies and those of the extras. KeyError: no such extra."""
    found = [
        *_project()["dependencies"],
        *(requirement for name in extras for requirement in extra(name)),
    ]
    return list(dict.fromkeys(found))


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())["project"]
    return project


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
