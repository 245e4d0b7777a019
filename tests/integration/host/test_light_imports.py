"""What stays light: the API and the command start in a moment, without a library of the
engines'.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "vllm", "transformers", "scipy"}
SERVERS = {"celery", "numpy", "fastapi", "redis", "httpx"}
SHARED = (
    *(
        "poc_core.schemes.artifact.encoding",
        "poc_core.records",
        "poc_core.arithmetic.statistics",
    ),
    *(
        "poc_core.schemes.artifact.verdict",
        "workers.engines.synthetic",
    ),
)
CONTRACTS = "from poc_core.schemes.contract import contracts; contracts()"


def imported_by(code: str) -> set[str]:
    """The packages that a process has imported once it ran `code`."""
    code += "\nimport sys\nprint('imported:', *sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    last = answer.stdout.splitlines()[-1]
    assert last.startswith("imported: sys ")
    return set(last.split())


def test_the_api() -> None:
    # Numpy comes with the first vectors to validate: 25 MB that most front ends need not spend.
    assert imported_by("import api.app") & (HEAVY | {"numpy"}) == set()


def test_what_the_api_shares_with_the_workers() -> None:
    assert imported_by(f"import {', '.join(SHARED)}\n{CONTRACTS}") & HEAVY == set()


def test_the_client() -> None:
    strange = {"numpy", "fastapi", "starlette", "celery", "redis"}
    assert imported_by("import proofline.client") & (HEAVY | strange) == set()


def test_help() -> None:
    code = "from cli.main import app\ntry: app({})\nexcept SystemExit: pass"
    assert imported_by(code.format(["--help"])) & (HEAVY | SERVERS) == set()
    clients = {"redis", "httpx"}
    assert imported_by(code.format(["up", "--help"])) & (HEAVY | SERVERS) == clients
