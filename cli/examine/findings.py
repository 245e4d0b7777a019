"""Findings of checks, and how checks run: a check that breaks is a finding too."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from poc_core.errors import ProoflineError

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """A check's result about one thing; `remedy`: what to do, where there is something to do."""

    about: str
    level: Level
    says: str
    remedy: str = ""


# A check's subject in words, and the function that looks.
Check = tuple[str, Callable[[], Iterable[Finding]]]


def ok(about: str, says: str) -> Finding:
    return Finding(about, "ok", says)


def warning(about: str, says: str, remedy: str) -> Finding:
    """A finding about what works but could be better, or may not be meant."""
    return Finding(about, "warning", says, remedy)


def problem(about: str, says: str, remedy: str) -> Finding:
    """A finding about what will not work."""
    return Finding(about, "problem", says, remedy)


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """Findings of all checks, in order, each as soon as it is known."""
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
