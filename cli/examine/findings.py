"""Findings of checks. A check that raises an error yields a finding too."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from poc_core.errors import ProoflineError

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """A check's result about one subject. `remedy`: what to do; empty if nothing needs doing."""

    about: str
    level: Level
    says: str
    remedy: str = ""


# A check: the name of its subject, and a function that yields findings.
Check = tuple[str, Callable[[], Iterable[Finding]]]


def ok(about: str, says: str) -> Finding:
    return Finding(about, "ok", says)


def warning(about: str, says: str, remedy: str) -> Finding:
    """Returns a finding about something that works, but could be better or may be unintended."""
    return Finding(about, "warning", says, remedy)


def problem(about: str, says: str, remedy: str) -> Finding:
    """Returns a finding about something that will not work."""
    return Finding(about, "problem", says, remedy)


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """Runs the checks in order, and yields each finding as soon as it is known."""
    for about, look in checks:
        try:
            yield from look()
        except ProoflineError as error:
            yield problem(about, str(error), "As it says.")
        except Exception as error:
            yield problem(
                about,
                f"Could not be looked at: {type(error).__name__}: {error}",
                "Look at it by hand; if it is in order, this is a mistake of `proofline doctor`:"
                " please report it.",
            )
