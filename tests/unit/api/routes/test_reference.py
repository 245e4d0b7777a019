"""/docs and /redoc: the API's reference, whole from the package, under a policy of its own."""

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api.console.page import REFERENCE_FOLDER, load

FILES = load(REFERENCE_FOLDER)
VENDORED = FILES["vendor/VERSIONS.txt"].content.decode()


def test_files_that_an_editor_or_an_older_version_left_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    for name in ("docs.html", ".docs.html.swp", "docs.html~", "__pycache__/page.cpython-311.pyc"):
        (tmp_path / name).touch()
    assert [*load(tmp_path)] == ["docs.html"]


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_a_page_names_files_that_are_served_and_nobody_else(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href|spec-url)="([^"]+)"', answer.text)
    assert len(named) >= 3
    assert "//" not in "".join(named)
    assert [name for name in named if client.get(f"/{name}").status_code != 200] == []


def test_redoc_has_no_picture_from_elsewhere(client: TestClient) -> None:
    assert "cdn." not in client.get("/docs/vendor/redoc.standalone.js").text


def test_swagger_ui_asks_nobody_what_is_wrong_with_the_description(client: TestClient) -> None:
    assert "validatorUrl: null" in client.get("/docs/docs.js").text
    assert client.get("/openapi.json").json()["info"]["title"] == "Proofline"


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/docs.js"])
def test_only_files_of_the_package_may_run(client: TestClient, path: str) -> None:
    rules = client.get(path).headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(rules)
    assert "frame-ancestors 'none'" in rules
    assert not [rule for rule in rules if "http" in rule]


@pytest.mark.parametrize("path", ["nothing.js", "../page.py", "%2e%2e/page.py", "oauth2-redirect"])
def test_nothing_but_its_files_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/docs/{path}").status_code == 404


def test_what_others_made_has_its_licence_beside_it() -> None:
    named = set(re.findall(r"[\w.-]+\.LICENSE\.txt", VENDORED))
    assert {f"vendor/{name}" for name in named} == {
        name for name in FILES if name.endswith(".LICENSE.txt")
    }
    scripts = {
        name.removeprefix("vendor/") for name in FILES if re.match(r"vendor/.*\.(js|css)", name)
    }
    assert [name for name in scripts if name not in VENDORED] == []
