"""Finds known holes in what is installed and locked, and checked-in secrets: `make audit`.

Needs no network. Both are a net with wide meshes: the holes are those of locks/advisories.toml, and
a secret is found by its form alone.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
# Larger files are weights and pictures.
_MOST_BYTES = 2_000_000
# A value that nobody chose, in services' own forms; each begins as only a secret does.
SECRETS = {
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{32}",
    "a key of Proofline's API": r"\bproofline_[A-Za-z0-9_-]{43}\b",
    "a token of the Hugging Face hub": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a token of GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{60,})\b",
    "a token of PyPI": r"\bpypi-AgE[\w-]{50,}",
    "a key of AWS": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a key of an inference service": r"\bsk-(?:[a-z]+-)*[A-Za-z0-9_-]{32,}\b",
    "a token of Slack": r"\bxox[abprs]-[A-Za-z0-9-]{20,}",
    "a signed token (JWT)": r"\beyJ[\w-]{15,}\.eyJ[\w-]{15,}\.[\w-]{20,}",
    "a url with a password": (
        r"://[^\s/:@\"']*:(?=[^\s/@]*\d)(?:[0-9A-Fa-f]{16,}|[\w+=.~%-]{24,})@[\w\[]"
    ),
    "a key in a header": r"(?i)\b(?:Bearer|Basic)\s+(?=[^\s]*\d)[\w+/=.~-]{20,}",
    "a password of 24 random digits or more": (
        r"(?i)(?:password|passwd|secret|token)\w*[\"']?\s*[=:]\s*[\"']?[0-9a-f]{24,}\b"
    ),
}


@dataclass(frozen=True)
class Advisory:
    package: str
    fixed: Version  # the first version without the hole
    what: str


def advisories() -> list[Advisory]:
    found = tomllib.loads((LOCKS / "advisories.toml").read_text())["advisory"]
    return [
        Advisory(canonicalize_name(one["package"]), Version(one["fixed"]), one["what"])
        for one in found
    ]


def installed() -> Iterator[tuple[str, str]]:
    """(name, version) of everything in this environment."""
    for distribution in metadata.distributions():
        yield distribution.metadata["Name"], distribution.version


def locked() -> Iterator[tuple[str, str]]:
    """(name, version) of everything in the locks."""
    for lock in sorted(LOCKS.glob("*.txt")):
        yield from PIN.findall(lock.read_text())


def holes(versions: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> list[str]:
    """A sentence for each version that has a known hole."""
    known = advisories()
    return sorted(
        {
            f"{name} {version} has a known hole, mended in {one.fixed}: {one.what}."
            for name, version in versions
            for one in known
            if one.package == canonicalize_name(name) and Version(version) < one.fixed
        }
    )


def secrets_in(text: str) -> list[str]:
    """What kinds of secrets a text seems to hold."""
    return [kind for kind, pattern in SECRETS.items() if re.search(pattern, text)]


def secrets() -> list[str]:
    """A sentence for each checked-in file that seems to hold one."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    found = []
    for name in sorted(filter(None, listed.decode().split("\0"))):
        path = ROOT / name
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            continue
        found += [
            f"{name} seems to hold {kind}." for kind in secrets_in(path.read_text(errors="replace"))
        ]
    return found


def main() -> int:
    problems = [*holes([*installed(), *locked()]), *secrets()]
    print(
        "\n".join(problems)
        or f"No hole of the {len(advisories())} that are listed, and no secret seen."
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
