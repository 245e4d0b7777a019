"""Pages can be read: each begins with what it answers, and no paragraph is a wall."""

import re
from pathlib import Path

import pytest

from tests.harness.documents import DOCUMENTS, ROOT, headings, name, without_blocks

LONGEST_PARAGRAPH = 600  # characters: five lines of 120
LONGEST_OPENING = 300
# A table's row, a heading, a comment or a picture: no prose.
_NO_PROSE = re.compile(r"\||#|<!--|!\[|\$\$|    ")
_ITEM = re.compile(r"\s*(?:[*-]|\d+\.) ")


def paragraphs(text: str) -> list[str]:
    """The prose of a page as it is read, without links' targets; each item of a list is one."""
    found = [""]
    for line in without_blocks(text).splitlines():
        is_item, is_prose = _ITEM.match(line), not _NO_PROSE.match(line)
        if is_item or not is_prose or not line.strip():
            found.append("")
        if is_item or is_prose:
            found[-1] = f"{found[-1]} {line.strip()}".strip()
    return [re.sub(r"\]\([^)]*\)", "]", paragraph) for paragraph in found if paragraph]


def test_items_of_a_list_are_paragraphs_of_their_own_and_tables_none() -> None:
    page = "# T\n\nOne\nand [more](x.md).\n\n* a\n  b\n    * c\n\n| d |\n|---|\n"
    assert paragraphs(page) == ["One and [more].", "* a b", "* c"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_no_paragraph_is_longer_than_five_lines(document: Path) -> None:
    """Else make it a list or a table."""
    long = [p for p in paragraphs(document.read_text()) if len(p) > LONGEST_PARAGRAPH]
    assert long == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_a_page_begins_with_a_title_and_what_it_answers(document: Path) -> None:
    title, blank, opening = document.read_text().split("\n", 2)
    assert re.match(r"# \S", title)
    assert blank == ""
    assert not _NO_PROSE.match(opening)
    assert not _ITEM.match(opening)
    assert 20 < len(paragraphs(opening)[0]) <= LONGEST_OPENING


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("8 GPUs", "recipes"),
        ("Backup", "backup"),
        ("Connect", "connect"),
        ("MiniMax-M2.7", "recipes"),
        ("Tool calling", "api"),
        ("TypeScript", "api"),
        ("Upgrade", "install"),
        ("VRAM", "recipes"),
    ],
)
def test_what_operators_search_for_is_in_a_heading_of_one_page(words: str, page: str) -> None:
    """A search shows headings first."""
    found = {
        document.stem
        for document in DOCUMENTS
        if document.parent != ROOT and any(words in heading for heading in headings(document))
    }
    assert found == {page}
