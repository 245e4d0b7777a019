"""What `make mutants` mutates, and which of its tests should see it, is there."""

import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script, whose cosmic-ray is installed elsewhere."""
    for name in ("cosmic_ray", "cosmic_ray.work_db", "cosmic_ray.work_item"):
        monkeypatch.setitem(sys.modules, name, Mock())
    return runpy.run_path(str(ROOT / "scripts" / "mutants.py"))


def test_areas_and_their_tests_are_there(mutants: dict[str, Any]) -> None:
    named = {name for area, tests in mutants["AREAS"].items() for name in (area, *tests)}
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
