"""The results of `doctor`'s checks. A check that raises an error also gives a result."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from poc_core.errors import ProoflineError

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. `remedy`: what the operator should do; empty if nothing."""

    about: str
    level: Level
    says: str
    remedy: str = ""


# A check: the name of its subject, and a function that yields findings.
Check = tuple[str, Callable[[], Iterable[Finding]]]


class Subject(str):
    """The subject of a check, such as "gpu". Its methods create findings about it."""

    def ok(self, says: str) -> Finding:
        return Finding(self, "ok", says)

    def warning(self, says: str, remedy: str) -> Finding:
        """Returns a finding about something that works, but not as well as possible."""
        return Finding(self, "warning", says, remedy)

    def problem(self, says: str, remedy: str = "Follow this message.") -> Finding:
        return Finding(self, "problem", says, remedy)


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """Runs the checks in order and yields their findings. An exception becomes a finding too."""
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
