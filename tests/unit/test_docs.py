"""What texts cite is there: sections of the protocol, files, headings, modules."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from api.node_metrics.families import ALL, ENGINE

pytestmark = pytest.mark.xdist_group("docs")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "bench", "cli", "lab", "poc_core", "tests", "workers")
FOLDERS = (*PACKAGES, "docker", "docs", "locks", "models", "proofline", "scripts")
# Files that cite nothing of ours: others' work, and what each set-up makes anew.
FOREIGN = {".venv", ".git", "build", "dist", "__pycache__"}


def repository() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.is_file()]
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in top + below if not FOREIGN & set(path.relative_to(ROOT).parts))


FILES = repository()


def prose(path: Path) -> str:
    """What a file says: a document's text, a program's docstrings, each as one line."""
    text = path.read_text()
    parts = [text] if path.suffix == ".md" else docstrings(text)
    return "\n".join(re.sub(r"\s*\n\s*", " ", part) for part in parts)


def docstrings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


@cache  # and not at import: every process of `make test` imports this module, one runs its tests
def proses() -> dict[Path, str]:
    return {path: prose(path) for path in FILES if path.suffix in (".md", ".py")}


def found(pattern: str) -> list[tuple[str, tuple[str, ...]]]:
    """(file, groups) of every place in any prose that matches."""
    return [
        (str(path.relative_to(ROOT)), match.groups())
        for path, text in proses().items()
        for match in re.finditer(pattern, text)
    ]


@cache
def protocol() -> set[str]:
    """The numbers of the protocol's sections, "2" and "2.6" alike."""
    text = (ROOT / "docs/protocol.md").read_text()
    sections = set[str]()
    for heading in re.finditer(r"^## (\d+)\. (.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        number, body = heading.groups()
        sections.add(number)
        for item in re.finditer(rf"^(?:(\d+)\.|### {number}\.(\d+)) ", body, re.MULTILINE):
            sections.add(f"{number}.{item[1] or item[2]}")
    return sections


@cache
def headings(document: Path) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE))


def test_cited_sections_of_the_protocol_exist() -> None:
    number = r"\d+(?:\.\d+)?"
    cited = [
        *found(rf"[Ss]ections? ({number})(?:(?:, | and | to )({number}))*"),
        *found(rf"sections? {number}(?:, {number})*(?: and | to )({number})"),
        *found(r"\((\d\.\d)\)"),
    ]
    assert len(cited) > 30
    wrong = [
        (file, section)
        for file, sections in cited
        for section in sections
        if section and section not in protocol()
    ]
    assert wrong == []


def test_cited_files_exist() -> None:
    """By their path from the top or from the citing file, or by the last parts of their path."""
    cited = found(
        r"(?<![\w./<{*-])((?:\.\./)?[\w][\w./-]*\.(?:py|lua|sh|md|toml|yaml|Dockerfile))\b"
    )
    assert len(cited) > 60
    known = [f"/{path.relative_to(ROOT)}" for path in FILES]
    wrong = [
        (file, name)
        for file, (name,) in cited
        if not any(path.endswith(f"/{name}") for path in known)
        and not ((ROOT / file).parent / name).is_file()
    ]
    assert wrong == []


def test_cited_headings_exist() -> None:
    """As in: docs/scale.md, "Many hosts"; also without quotes, as far as one can tell where
    such a heading ends.
    """
    cited = [*found(r'([\w/]+\.md), "([^"]+)"'), *found(r"([\w/]+\.md), ([A-Z][\w ]*\w)[).;:]")]
    assert cited
    for file, (name, heading) in cited:
        documents = [path for path in FILES if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")]
        assert any(heading in headings(document) for document in documents), (
            f"{file} cites {name}, {heading}"
        )


def test_cited_folders_and_paths_exist() -> None:
    cited = found(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*)")
    assert len(cited) > 60
    wrong = []
    for file, (name,) in cited:
        path = ROOT / name.rstrip("./-")
        if not path.exists() and not path.with_name(f"{path.name}.py").exists():
            wrong.append((file, name))
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_cited_modules_exist(package: str) -> None:
    """As in `uvicorn api.app:create_app`: what follows a module's name stands in that module."""
    for file, (name,) in found(rf"(?<![\w./-])({package}(?:[.:]\w+)+)"):
        if re.search(r"\.(py|md|lua)$", name):
            continue
        place = ROOT
        for part in re.split("[.:]", name):
            if place.is_dir():
                place = next(
                    (p for p in (place / f"{part}.py", place / part) if p.exists()),
                    place / "__init__.py",
                )
            if place.is_file() and place.stem != part:
                assert re.search(rf"\b{part}\b", place.read_text()), f"{file} cites {name}"


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (test_cited_sections_of_the_protocol_exist, "section 9.9"),
        (test_cited_files_exist, "docs/none.md"),
        (test_cited_headings_exist, 'docs/scale.md, "No such heading"'),
        (test_cited_folders_and_paths_exist, "docs/none"),
        (partial(test_cited_modules_exist, "api"), "api.app:nothing"),
    ],
    ids=["section", "file", "heading", "path", "module"],
)
def test_a_wrong_citation_is_found(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[], None], wrong: str
) -> None:
    planted = {**proses(), ROOT / "planted.md": f"See {wrong}."}
    monkeypatch.setitem(globals(), "proses", lambda: planted)
    with pytest.raises(AssertionError, match=r"planted\.md"):
        check()


def test_every_family_of_our_own_in_the_networks_metrics_is_in_the_table() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    ours = {family.name for family in ALL if family not in ENGINE}
    assert set(re.findall(r"`((?:mlnode|gonka)_\w+)`", page)) == ours
