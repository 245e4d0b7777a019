"""Pages are readable: an opening, short paragraphs, plain words, subjects first, no history."""

import re
from pathlib import Path

import pytest

from tests.harness.documents import DOCUMENTS, ROOT, headings, name, without_blocks

LONGEST_PARAGRAPH, LONGEST_OPENING = 600, 300  # characters: five lines of 120
ALL_WORDS = 40_000  # of all pages, as `wc -w` counts
# A table's row, a heading, a comment or a picture: no prose.
_NO_PROSE = re.compile(r"\||#|<!--|!\[|\$\$|    ")
_ITEM = re.compile(r"\s*(?:[*-]|\d+\.) ")
# Old or invented words. Write instead: repair, again, available, in progress, during or next to,
# except, reports or gets, a client that, evaluation, generated, network node.
OLD_WORDS = re.compile(
    r"\b(?:mend(?:s|ed)?|anew|at hand|in hand|beside|but for|(?:is|are) told|whoever|judgement"
    r"|made[ -]up|network's (?:client|API process|broker|node(?! config)))\b",
    re.IGNORECASE,
)
# A sentence that begins so puts its subject last.
SUBJECT_LAST = re.compile(r"(?:^|[.:;] |\* )(?:Of|As|What|Whose) [^?|]*[.]")
DATE = re.compile(r"(?<!results/)\b20\d\d-\d\d-\d\d\b")
WITH_DATES = {"CHANGELOG.md", "docs/rates.md"}
# Terms that a reader knows from nowhere else.
TERMS = ("nonce", "artifact", "micro-batch", "courier", "dist_threshold", "k_dim")
# The contract, the generated tables, and the glossary.
WITHOUT_LINKS = {"docs/protocol.md", "docs/settings.md", "docs/commands.md", "docs/concepts.md"}


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


def faults(page: str, text: str) -> list[str]:
    plain = re.sub(r"<!--.*?-->", "", without_blocks(text), flags=re.DOTALL)
    plain = re.sub(r"`[^`\n]*`|^#.*$|^    .*$", "`", plain, flags=re.MULTILINE)
    found = [p for p in paragraphs(text) if len(p) > LONGEST_PARAGRAPH]
    found += OLD_WORDS.findall(re.sub(r"\]\([^)]*\)", "]", plain))
    found += [one for p in paragraphs(plain) for one in SUBJECT_LAST.findall(p)]
    found += [] if page in WITH_DATES else DATE.findall(text)
    # A table's head, formulas and other links' texts are no place for a link.
    places = r"^\|.*\|\n(?=\|[-|]+\n)|\$[^$\n]*\$|!?\[[^\]]*\]\((?!\S*concepts)[^)]*\)"
    words = re.sub(places, "", plain, flags=re.MULTILINE)
    for term in () if page in WITHOUT_LINKS else TERMS:
        if re.search(rf"(?i)\b{term}s?\b", words) and f"concepts.md#{term})" not in text:
            found.append(f"link {term} to concepts.md#{term}")
    title, blank, opening = text.split("\n", 2)
    begins = bool(re.match(r"# \S", title)) and not (blank or _NO_PROSE.match(opening))
    is_short = 20 < len((paragraphs(opening) or [""])[0]) <= LONGEST_OPENING
    if not begins or _ITEM.match(opening) or not is_short:
        found.append("begin with a title and what the page answers")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_a_page_is_readable(document: Path) -> None:
    assert faults(name(document), document.read_text()) == []


def test_all_pages_keep_to_their_words() -> None:
    assert sum(len(document.read_text().split()) for document in DOCUMENTS) <= ALL_WORDS


def test_what_operators_search_for_is_in_a_heading_of_one_page() -> None:
    """A search shows headings first."""
    pages = {page.stem: " ".join(headings(page)) for page in DOCUMENTS if page.parent != ROOT}
    for words, page in (
        *(("8 GPUs", "recipes"), ("MiniMax-M2.7", "recipes"), ("VRAM", "recipes")),
        *(("Tool calling", "api"), ("TypeScript", "api"), ("Upgrade", "install")),
        *(("Backup", "backup"), ("Connect", "connect")),
    ):
        assert [one for one, text in pages.items() if words in text] == [page], words
