"""Pages can be read: each begins with what it answers, and no paragraph is a wall.

Words of the field, the subject first, terms linked to the glossary, budgets, no history.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.harness.documents import DOCUMENTS, ROOT, blocks, headings, name, without_blocks

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


# Words of a page, as `wc -w` counts them, and of all pages together.
ALL_WORDS = 40_000
BUDGETS = {
    "README.md": 760,
    "SECURITY.md": 2800,
    "CONTRIBUTING.md": 650,
    "CHANGELOG.md": 320,
    "docs/api.md": 1920,
    "docs/architecture.md": 2740,
    "docs/backup.md": 400,
    "docs/benchmarks.md": 750,
    "docs/chat.md": 1440,
    "docs/client.md": 520,
    "docs/commands.md": 630,
    "docs/concepts.md": 860,
    "docs/connect.md": 950,
    "docs/decode.md": 770,
    "docs/deploy.md": 770,
    "docs/distance.md": 810,
    "docs/install.md": 790,
    "docs/kubernetes.md": 1290,
    "docs/limits.md": 1260,
    "docs/migrate.md": 980,
    "docs/models.md": 1080,
    "docs/monitor.md": 1700,
    "docs/proofs.md": 1470,
    "docs/protocol.md": 4610,
    "docs/rates.md": 810,
    "docs/recipes.md": 1660,
    "docs/redis.md": 1020,
    "docs/report.md": 710,
    "docs/scale.md": 1940,
    "docs/settings.md": 1420,
    "docs/start.md": 390,
    "docs/troubleshoot.md": 2430,
}
# Old or invented words, and what to write instead.
INSTEAD = {
    r"mend(?:s|ed)?": "fix, repair",
    r"anew": "again",
    r"at hand": "available",
    r"in hand": "in progress",
    r"beside": "during, next to, in addition to",
    r"but for": "except",
    r"(?:is|are) told": "prints, reports, gets",
    r"whoever": "a client that, the worker that",
    r"judgement": "evaluation, verdict",
    r"made[ -]up": "generated, invented",
    r"network's (?:client|API process|broker|node(?! config))": "network node",
}
_INSTEAD = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.IGNORECASE)
# A sentence that begins so puts its subject last.
_SUBJECT_LAST = re.compile(r"(?:^|[.:;] |\* )(?:Of|As|What|Whose) [^?|]*[.]")
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
WITH_DATES = {"CHANGELOG.md", "docs/rates.md"}
# Terms that a reader knows from nowhere else.
TERMS = ("nonce", "artifact", "micro-batch", "courier", "dist_threshold", "k_dim")
# The contract, the generated tables, and the glossary with what comes before it.
WITHOUT_LINKS = {"docs/protocol.md", "docs/settings.md", "docs/commands.md", "docs/concepts.md"}


def prose_only(text: str) -> str:
    """Without blocks, code between backticks, comments, headings and links' targets."""
    text = re.sub(r"<!--.*?-->", "", without_blocks(text), flags=re.DOTALL)
    text = re.sub(r"^(?:#.*|    .*)$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "`", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_words_are_those_of_the_field(document: Path) -> None:
    text = prose_only(document.read_text())
    assert _INSTEAD.findall(text) == [], f"write instead: {INSTEAD}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_sentences_begin_with_their_subject(document: Path) -> None:
    found = [
        sentence
        for paragraph in paragraphs(prose_only(document.read_text()))
        for sentence in _SUBJECT_LAST.findall(paragraph)
    ]
    assert found == []


PRODUCT = ("api", "cli", "lab", "poc_core", "proofline", "workers")
# Docstrings, most of them in poc_core/state, that still have such a word or sentence; only fewer.
MOST_EXCEPTIONS = 20


def test_docstrings_begin_with_their_subject_in_words_of_the_field() -> None:
    found = []
    for path in sorted(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = re.sub(r"`[^`]*`", "`", ast.get_docstring(node) or "")
                if _INSTEAD.search(text) or re.match(r"(?:Of|As|What|Whose|Whether)\b", text):
                    found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert len(found) <= MOST_EXCEPTIONS, f"write instead: {INSTEAD}\n" + "\n".join(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_dates_are_in_the_changelog_and_the_results(document: Path) -> None:
    if name(document) not in WITH_DATES:
        text = re.sub(r"bench/results/[\w-]+", "", document.read_text())
        assert _DATE.findall(text) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_a_term_is_linked_to_the_glossary_where_it_comes_first(document: Path) -> None:
    if name(document) in WITHOUT_LINKS:
        return
    text = re.sub(r"<!--.*?-->", "", without_blocks(document.read_text()), flags=re.DOTALL)
    # A table's head, formulas, code, headings and other links' texts are no place for a link.
    elsewhere = (
        r"^\|.*\|\n(?=\|[-|]+\n)|\$[^$\n]*\$|`[^`\n]*`|^#.*$|^    .*$"
        r"|!?\[[^\]]*\]\((?!\S*concepts)[^)]*\)"
    )
    text = re.sub(elsewhere, "", text, flags=re.MULTILINE)
    for term in TERMS:
        first = re.search(rf"(?i)\b{term}s?\b(?:\**\]\(\S*concepts\.md#(\S+)\))?", text)
        assert first is None or first[1] == term, f"link {term} to concepts.md#{term}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_a_page_keeps_to_its_budget(document: Path) -> None:
    """Else say it shorter, or elsewhere; a new page gets a budget."""
    assert len(document.read_text().split()) <= BUDGETS[name(document)]


def test_all_pages_keep_to_their_words() -> None:
    assert sum(len(document.read_text().split()) for document in DOCUMENTS) <= ALL_WORDS


@pytest.mark.parametrize("page", ["docs/start.md"])
def test_commands_show_their_output(page: str) -> None:
    kinds = [block.kind for block in blocks(ROOT / page)]
    assert kinds[:6] == ["sh", "text"] * 3


def test_all_places_name_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (ROOT / "docker/chart/Chart.yaml").read_text()
    assert re.findall(r"^(?:version|appVersion): (.*)$", chart, flags=re.MULTILINE) == [version] * 2
    assert re.search(
        rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
