"""The README says what the code does: settings, commands, links, and requests that the API accepts."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi.testclient import TestClient

from cli.main import app
from poc_core.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HOST = "http://127.0.0.1:8000"


def settings_table() -> str:
    rows = ["| Variable | Default | Meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "unset" if field.default is None else f"`{field.default}`"
        rows.append(f"| `POC_{name.upper()}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def requests() -> Iterator[tuple[str, str, str | None]]:
    """(method, path, body or None) of every curl in the README, in order."""
    for block in re.findall(r"^```sh\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE):
        words = shlex.split(block, comments=True)
        for start in (i for i, word in enumerate(words) if word.endswith("curl")):
            command = words[start : start + 8]
            url = next(word for word in command if word.startswith(HOST))
            body = command[command.index("-d") + 1] if "-d" in command else None
            yield "POST" if body is not None or "POST" in command else "GET", url.removeprefix(HOST), body


BODIES = [(path, body) for _, path, body in requests() if body is not None]
PROOF_BODIES = [(path, body) for path, body in BODIES if path.startswith("/api/")]


def test_every_setting_is_in_the_table_as_the_code_has_it() -> None:
    assert settings_table() in README, f"put this table into README.md:\n{settings_table()}"


def test_every_command_is_in_the_table() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for_people = {name for name, command in commands.items() if not command.hidden}
    assert set(re.findall(r"^\| `proofline (\w+)` \|", README, flags=re.MULTILINE)) == for_people


def test_there_are_examples_of_jobs_rounds_and_chat() -> None:
    assert [path for path, _ in BODIES] == [
        *["/api/v1/pow/generate"] * 3,
        "/v1/chat/completions",
        "/api/v1/pow/init/generate",
    ]


@pytest.mark.parametrize(("path", "body"), PROOF_BODIES)
def test_the_api_accepts_the_readmes_requests(
    path: str, body: str, client: TestClient, serve: Callable[..., Any]
) -> None:
    serve("w1")
    answer = client.post(path, json=json.loads(body) | {"wait": False})
    assert (answer.status_code, answer.json()["status"]) in [(200, "queued"), (200, "OK")]


def test_the_other_requests_have_paths_that_exist(client: TestClient) -> None:
    known = set(client.get("/openapi.json").json()["paths"])
    asked = {re.sub(r"\$\w+$", "{request_id}", path) for _, path, _ in requests()}
    assert asked - known == set()


def test_the_artifacts_to_check_are_the_references_own() -> None:
    """Computed on an H200: see tests/data/golden."""
    request = next(json.loads(body) for _, body in BODIES if "validation" in body)
    golden = json.loads((ROOT / "tests/data/golden/h200-tiny-qwen3-bfloat16.json").read_text())
    case = next(c for c in golden["artifact"] if c["block_hash"] == request["block_hash"] and not c["poc_stronger_rng"])
    assert (case["public_key"], case["seq_len"]) == (request["public_key"], request["params"]["seq_len"])
    reference = {artifact["nonce"]: artifact["vector_b64"] for artifact in case["artifacts"]}
    for artifact in request["validation"]["artifacts"]:
        assert artifact["vector_b64"] == reference[artifact["nonce"]]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{document.name} links to {target}"


def anchors(file: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        name for file in DOCUMENTS for name in re.findall(r"(?:`|^)make ([a-z-]+)", file.read_text(), re.MULTILINE)
    }
    assert named - targets == set()


def test_settings_named_in_the_documents_exist() -> None:
    known = {f"POC_{name.upper()}" for name in Settings.model_fields}
    for file in DOCUMENTS:
        assert set(re.findall(r"\bPOC_[A-Z_]+\b", file.read_text())) <= known, file.name
