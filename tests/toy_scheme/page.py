"""The scheme that poc_core/schemes/README.md shows, written out as a folder."""

from collections.abc import Iterable
from pathlib import Path

from tests.harness.documents import ROOT, Block, blocks


def examples(document: str, section: str) -> list[Block]:
    """The blocks below a heading."""
    return [block for block in blocks(ROOT / document) if block.section == section]


def install(files: Iterable[Block], schemes: Path) -> None:
    """Writes the scheme `peaks` into the folder of schemes; each block begins with its name."""
    (schemes / "peaks").mkdir()
    (schemes / "peaks" / "__init__.py").touch()
    for file in files:
        name = file.text.removeprefix("# ").partition(":")[0]
        (schemes / "peaks" / name).write_text(file.text)
