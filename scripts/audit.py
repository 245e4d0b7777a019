"""Finds vulnerable versions, installed or locked, and checked-in secrets: `make audit`.

Works without a network: the vulnerabilities are those of locks/advisories.toml, and secrets are
found only by their form.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
_MOST_BYTES = 2_000_000  # larger files are weights and pictures
# Kind of secret -> its form.
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


def advisories() -> list[dict[str, str]]:
    found: list[dict[str, str]] = tomllib.loads((LOCKS / "advisories.toml").read_text())["advisory"]
    return found


def versions() -> Iterator[tuple[str, str]]:
    """Yields (name, version) of everything in this environment and in the locks."""
    for distribution in metadata.distributions():
        yield distribution.metadata["Name"], distribution.version
    for lock in sorted(LOCKS.glob("*.txt")):
        yield from PIN.findall(lock.read_text())


def holes(found: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a sentence for each version that has a known vulnerability."""
    known = advisories()
    return sorted(
        {
            f"{name} {version} has a known vulnerability, fixed in {one['fixed']}: {one['what']}."
            for name, version in found
            for one in known
            if canonicalize_name(one["package"]) == canonicalize_name(name)
            and Version(version) < Version(one["fixed"])
        }
    )


def secrets_in(text: str) -> list[str]:
    """Returns the kinds of secrets that a text seems to contain."""
    return [kind for kind, pattern in SECRETS.items() if re.search(pattern, text)]


def secrets() -> list[str]:
    """Returns a sentence for each checked-in file that seems to contain a secret."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name for name in sorted(listed.stdout.decode().split("\0")) if name]
    return [
        f"{path.relative_to(ROOT)} seems to contain {kind}."
        for path in paths
        if path.is_file() and path.stat().st_size <= _MOST_BYTES
        for kind in secrets_in(path.read_text(errors="replace"))
    ]


if __name__ == "__main__":
    problems = [*holes(versions()), *secrets()]
    print("\n".join(problems) or f"None of {len(advisories())} vulnerabilities, and no secret.")
    sys.exit(bool(problems))
