"""The documentation as tests look at it: its files, their headings and fenced blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.build_docs import ROOT, sources

DOCUMENTS = [path for path in sources() if path.suffix == ".md"]
# A fence, the lines up to the fence that closes it, and a comment on the line above.
_BLOCK = re.compile(
    r"(?:^[ ]*<!--\s*(?P<comment>(?:(?!-->).)*?)\s*-->\n)?"
    r"^(?P<indent>[ ]*)```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text, the heading above, and the comment right above."""

    document: str
    line: int
    section: str
    kind: str
    text: str
    comment: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def name(document: Path) -> str:
    """The path from the top, as docs/install.md."""
    return str(document.relative_to(ROOT))


def blocks(document: Path) -> Iterator[Block]:
    """The document's fenced blocks, in order."""
    text = document.read_text()
    for found in _BLOCK.finditer(text):
        above = re.findall(r"^#+ (.+)$", without_blocks(text[: found.start()]), flags=re.MULTILINE)
        indent = found["indent"]
        lines = [line.removeprefix(indent) for line in found["text"].splitlines(keepends=True)]
        line = text.count("\n", 0, found.start("kind")) + 1
        yield Block(
            name(document),
            line,
            above[-1] if above else "",
            found["kind"],
            "".join(lines),
            found["comment"] or "",
        )


def without_blocks(text: str) -> str:
    """The prose alone: a comment of a shell block is no heading."""
    return _BLOCK.sub("", text)


def headings(document: Path) -> list[str]:
    """All headings, in order, without their marks."""
    return re.findall(r"^#+ (.+)$", without_blocks(document.read_text()), flags=re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them: what follows # in a link."""
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings(document)
    }
