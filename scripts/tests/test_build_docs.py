"""`make docs`: the site builds without a warning, has every page, and fetches nothing foreign."""

import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown import Markdown

from scripts.build_docs import ROOT
from tests.harness.documents import DOCUMENTS, name

pytestmark = pytest.mark.xdist_group("site")  # one process builds it

CONFIG = ROOT / "zensical.toml"
# What a browser fetches by itself to show a page; an <a> is followed by people.
FETCHED = {
    "img": "src",
    "script": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}


class Fetched(HTMLParser):
    """Addresses that a page has its browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for key, value in attrs if key == FETCHED.get(tag) and value]


def in_nav(entry: Any) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in in_nav(part)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the script itself, in a copy of what it reads, as another test may build at the
    same time.
    """
    copy = tmp_path_factory.mktemp("site")
    (copy / "scripts").mkdir()
    for source in [
        *DOCUMENTS,
        *(ROOT / "docs").rglob("*.*"),
        CONFIG,
        *(ROOT / "scripts").glob("*.py"),
    ]:
        target = copy / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    done = subprocess.run(
        [sys.executable, copy / "scripts/build_docs.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, (
        done.stdout + done.stderr + "\nNo zensical? .venv/bin/pip install -e '.[docs]'"
    )
    assert "No issues found" in done.stderr
    return copy / "build" / "docs" / "site"


@pytest.fixture(scope="module")
def nav() -> list[str]:
    """Documents, and parts of them as page.html#anchor."""
    return in_nav(tomllib.loads(CONFIG.read_text())["project"]["nav"])


def test_every_document_is_in_the_navigation_once(nav: list[str]) -> None:
    assert sorted(page for page in nav if "#" not in page) == sorted(
        name(document) for document in DOCUMENTS
    )


def test_parts_in_the_navigation_exist(nav: list[str], site: Path) -> None:
    parts = [entry.split("#") for entry in nav if "#" in entry]
    assert parts
    assert [
        anchor for page, anchor in parts if f'id="{anchor}"' not in (site / page).read_text()
    ] == []


def test_every_document_becomes_a_page(site: Path) -> None:
    for document in DOCUMENTS:
        page = site / document.relative_to(ROOT).with_suffix(".html")
        page = page.with_name("index.html") if page.name == "README.html" else page
        title = next(
            line for line in document.read_text().splitlines() if line.startswith("# ")
        ).removeprefix("# ")
        assert f">{title}<a" in page.read_text(), page


def test_pages_fetch_nothing_from_outside(site: Path) -> None:
    for page in site.rglob("*.html"):
        parser = Fetched()
        parser.feed(page.read_text())
        assert parser.addresses, f"{page} fetches not even its style"
        assert [
            address for address in parser.addresses if re.match(r"(?:\w+:)?//", address)
        ] == [], page
        # zensical's script fetches the libraries of these classes from elsewhere.
        assert not re.search(r'class="[^"]*(?:mermaid|glightbox|pyodide)', page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", style.read_text()), style


def test_formulas_are_drawn_by_the_browser() -> None:
    extensions = ["pymdownx.arithmatex", "scripts.mathml"]
    made = Markdown(
        extensions=extensions, extension_configs={"pymdownx.arithmatex": {"generic": True}}
    )
    page = made.convert("So $a < b$, not `$a$`, and\n\n$$ \\sum_{k=m}^{n} x_k $$\n\nfor $5 and $6.")
    assert page.count("<math ") == 2
    assert "<mi>a</mi><mo>&#x0003C;</mo><mi>b</mi>" in page
    assert 'display="block"' in page
    assert "<code>$a$</code>" in page
    assert "for $5 and $6." in page
    assert "arithmatex" not in page
