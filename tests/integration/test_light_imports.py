"""What stays light: the API and the command start in a moment, without a library of the engines'."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "vllm", "transformers", "scipy"}
SERVERS = {"celery", "numpy", "fastapi", "redis", "httpx"}
ARITHMETIC = ("poc_core.encoding", "poc_core.nonces", "poc_core.schemes", "poc_core.statistics", "poc_core.validation")


def imported_by(code: str) -> set[str]:
    """The packages that a process has imported once it ran `code`."""
    code += "\nimport sys\nprint('imported:', *sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    last = answer.stdout.splitlines()[-1]
    assert last.startswith("imported: sys ")
    return set(last.split())


def test_the_api() -> None:
    assert imported_by("import api.app") & HEAVY == set()


def test_what_the_api_shares_with_the_workers() -> None:
    found = imported_by(f"import {', '.join(ARITHMETIC)}, workers.engines.synthetic")
    assert found & HEAVY == set()


def test_help() -> None:
    code = "from cli.main import app\ntry: app(['up', '--help'])\nexcept SystemExit: pass"
    assert imported_by(code) & (HEAVY | SERVERS) == set()
