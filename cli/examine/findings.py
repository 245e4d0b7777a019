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


class Subject(str):
    """The name of what findings are about."""

    def ok(self, says: str) -> Finding:
        return Finding(self, "ok", says)

    def warning(self, says: str, remedy: str) -> Finding:
        """Returns a finding about something that works, but could be better or is unintended."""
        return Finding(self, "warning", says, remedy)

    def problem(self, says: str, remedy: str = "As it says.") -> Finding:
        """Returns a finding about something that will not work."""
        return Finding(self, "problem", says, remedy)


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """Runs the checks in order, and yields each finding as soon as it is known."""
    for about, look in checks:
        try:
            yield from look()
        except ProoflineError as error:
            yield Subject(about).problem(str(error))
        except Exception as error:
            yield Subject(about).problem(
                f"Could not be looked at: {type(error).__name__}: {error}",
                "Look at it by hand; if it is in order, this is a mistake of `proofline doctor`:"
                " please report it.",
            )
