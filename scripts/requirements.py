"""Prints what Proofline needs, one requirement a line: `python3 scripts/requirements.py [EXTRA...]`.

An image installs these in a layer of their own, which a change of our code leaves as it is.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
OWN_EXTRA = re.compile(r"proofline\[([\w-]+)\]")


def requirements(extras: list[str]) -> list[str]:
    """The project's dependencies and those of the extras, extras within extras included. KeyError: no such extra."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    found = list(project["dependencies"])
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            own = OWN_EXTRA.fullmatch(requirement)
            found += requirements([own[1]]) if own else [requirement]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
