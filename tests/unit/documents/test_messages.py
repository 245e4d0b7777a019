"""The messages that docs/troubleshoot.md explains are messages of the code."""

import ast
import re
from collections.abc import Iterator

from tests.harness.documents import ROOT

PACKAGES = ("api", "cli", "poc_core", "workers")
# Texts of others' software.
FOREIGN = (
    "Address already in use",
    "Available memory on node",
    "is less than desired",
    "NCCL error: unhandled cuda error",
    "NOREPLICAS",
    "NOPERM",
    "MISCONF",
    "has no permissions to",
    "invalid username-password pair",
    "used memory > 'maxmemory'",
    "certificate verify failed",
)
# What stands for a name or number: of hosts, workers, calls and periodic work.
EXAMPLES = (
    r"\.\.\.|host1/gpu[\d-]+|host-gpu2|host1\b|^heartbeat|proof_tick"
    r"|exit code \d+|\d+(?:\.\d+)?|[()]"
)


def strings() -> Iterator[str]:
    """The code's texts; a text with inserted values has a NUL in the place of each."""
    for package in PACKAGES:
        yield from (path.read_text() for path in (ROOT / package).rglob("*.lua"))
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def quoted() -> Iterator[str]:
    """The pieces of at least two words of each message in the tables' column "You see"."""
    text = (ROOT / "docs" / "troubleshoot.md").read_text()
    for table in re.findall(r"^\| You see \|.*\n(?:\|.*\n)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            cell = line.split(" | ")[0]
            for double, single in re.findall(r"``(.+?)``|`([^`]+)`", cell):
                for foreign in FOREIGN:
                    double, single = (t.replace(foreign, "...") for t in (double, single))
                for piece in re.split(EXAMPLES, double or single):
                    if len(piece.split()) > 1:
                        yield piece.strip(" :;")


def test_each_message_that_troubleshoot_explains_is_a_text_of_the_code() -> None:
    known = "\n".join(strings())
    pieces = list(quoted())
    assert len(pieces) > 40
    assert not {piece for piece in pieces if piece not in known}
