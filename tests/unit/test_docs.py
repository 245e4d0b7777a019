"""What texts cite is there: sections of the protocol, files, headings, modules."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from api.node_metrics.families import ALL, ENGINE
from tests.harness.documents import headings

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
def proses() -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): prose(path) for path in FILES if path.suffix in (".md", ".py")
    }


def sections() -> set[str]:
    """The numbers of the protocol's sections, "2" and "2.6" alike."""
    found = set[str]()
    for part in re.split(r"^## ", (ROOT / "docs/protocol.md").read_text(), flags=re.MULTILINE):
        if number := re.match(r"\d+", part):
            body = part.partition("\n")[2]
            items = re.findall(rf"^(?:(\d+)\.|### {number[0]}\.(\d+)) ", body, re.MULTILINE)
            found |= {number[0], *(f"{number[0]}.{step or below}" for step, below in items)}
    return found


SECTIONS = sections()
NAMES = [f"/{path.relative_to(ROOT)}" for path in FILES]


def is_section(_file: str, cited: str) -> bool:
    return set(re.findall(r"\d+(?:\.\d+)?", cited)) <= SECTIONS


def is_file(file: str, cited: str) -> bool:
    """By its path from the top or from the citing file, or by the last parts of its path."""
    is_known = any(name.endswith(f"/{cited}") for name in NAMES)
    return is_known or ((ROOT / file).parent / cited).is_file()


def is_heading(_file: str, cited: str) -> bool:
    page, heading = re.split(', "?', cited.strip('"'))
    documents = [path for path, name in zip(FILES, NAMES, strict=True) if name.endswith(f"/{page}")]
    return any(heading in headings(document) for document in documents)


def is_path(_file: str, cited: str) -> bool:
    path = ROOT / cited.rstrip("./-")
    return path.exists() or path.with_name(f"{path.name}.py").exists()


def is_module(_file: str, cited: str) -> bool:
    """As in `uvicorn api.app:create_app`: what follows a module's name stands in that module."""
    place = ROOT
    for part in re.split("[.:]", cited):
        if place.is_dir():
            places = (place / f"{part}.py", place / part)
            place = next((p for p in places if p.exists()), place / "__init__.py")
        if place.is_file() and place.stem != part:
            return bool(re.search(rf"\b{part}\b", place.read_text()))
    return True


NUMBER = r"\d+(?:\.\d+)?"
# What is cited, how; whether it exists; one that does not; the fewest that the texts cite.
CITED: list[tuple[str, Callable[[str, str], bool], str, int]] = [
    (rf"[Ss]ections? ({NUMBER}(?:(?:, | and | to ){NUMBER})*)", is_section, "sections 1, 9.9", 30),
    (r"\((\d\.\d)\)", is_section, "(9.9)", 1),
    (
        r"(?<![\w./<{*-])((?:\.\./)?[\w][\w./-]*\.(?:py|lua|sh|md|toml|yaml|Dockerfile))\b",
        *(is_file, "docs/none.md", 60),
    ),
    (r'([\w/]+\.md, "[^"]+")', is_heading, 'docs/scale.md, "No such heading"', 1),
    (r"([\w/]+\.md, [A-Z][\w ]*\w)[).;:]", is_heading, "docs/scale.md, No such.", 0),
    (rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*)", is_path, "docs/none", 60),
    (
        rf"(?<![\w./-])(?![\w.:]*\.(?:py|md|lua)\b)((?:{'|'.join(PACKAGES)})(?:[.:]\w+)+)",
        *(is_module, "api.app:nothing", 30),
    ),
]


@pytest.mark.parametrize(("pattern", "exists", "wrong", "fewest"), CITED)
def test_what_is_cited_exists(
    pattern: str, exists: Callable[[str, str], bool], wrong: str, fewest: int
) -> None:
    planted = {**proses(), "planted.md": f"See {wrong}."}
    cited = [(file, m) for file, text in planted.items() for m in re.findall(pattern, text)]
    assert len(cited) > fewest
    missing = [(file, what) for file, what in cited if not exists(file, what)]
    assert [file for file, _ in missing] == ["planted.md"], missing


def test_every_family_of_our_own_in_the_networks_metrics_is_in_the_table() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    ours = {family.name for family in ALL if family not in ENGINE}
    assert set(re.findall(r"`((?:mlnode|gonka)_\w+)`", page)) == ours
