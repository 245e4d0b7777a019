"""README and the pages it leads to are true: settings, commands, requests that work."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.harness.documents import ROOT, blocks

HOST = "http://127.0.0.1:8000"
# Readers with five minutes see no more than a page or two.
README_LINES = 90


def requests(document: str) -> Iterator[tuple[str, str, str | None]]:
    """(method, path, body or None) of every curl in the document, in order."""
    for block in blocks(ROOT / document):
        if block.kind != "sh":
            continue
        words = shlex.split(block.text, comments=True)
        for start in (i for i, word in enumerate(words) if word.endswith("curl")):
            command = words[start : start + 8]
            url = next(word for word in command if word.startswith(HOST))
            body = command[command.index("-d") + 1] if "-d" in command else None
            yield (
                "POST" if body is not None or "POST" in command else "GET",
                url.removeprefix(HOST),
                body,
            )


REQUESTS = [*requests("README.md"), *requests("docs/api.md")]
BODIES = [(path, body) for _, path, body in REQUESTS if body is not None]
PROOF_BODIES = [(path, body) for path, body in BODIES if path.startswith("/api/")]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_there_are_examples_of_jobs_rounds_and_chat() -> None:
    assert [path for _, path, body in requests("docs/api.md") if body is not None] == [
        *["/api/v1/pow/generate"] * 4,
        *["/v1/chat/completions"] * 2,
        "/api/v1/pow/init/generate",
    ]


@pytest.mark.parametrize(("path", "body"), PROOF_BODIES)
def test_the_api_accepts_the_examples(
    path: str, body: str, client: TestClient, serve: Callable[..., Any]
) -> None:
    serve("w1")
    answer = client.post(path, json=json.loads(body) | {"wait": False})
    assert (answer.status_code, answer.json()["status"]) in [(200, "queued"), (200, "OK")]


def test_the_other_requests_have_paths_that_exist(client: TestClient) -> None:
    known = set(client.get("/openapi.json").json()["paths"])
    asked = {re.sub(r"\$\w+$", "{request_id}", path) for _, path, _ in REQUESTS}
    assert asked - known == set()


def test_the_artifacts_to_check_are_the_references_own() -> None:
    """Computed on an H200: see tests/data/golden."""
    request = next(json.loads(body) for _, body in BODIES if "validation" in body)
    golden = json.loads((ROOT / "tests/data/golden/h200-tiny-qwen3-bfloat16.json").read_text())
    case = next(
        c
        for c in golden["artifact"]
        if c["block_hash"] == request["block_hash"] and not c["poc_stronger_rng"]
    )
    assert (case["public_key"], case["seq_len"]) == (
        request["public_key"],
        request["params"]["seq_len"],
    )
    reference = {artifact["nonce"]: artifact["vector_b64"] for artifact in case["artifacts"]}
    for artifact in request["validation"]["artifacts"]:
        assert artifact["vector_b64"] == reference[artifact["nonce"]]
