"""SECURITY.md's promises name tests, which there must be."""

import ast
import re

import pytest

from tests.harness.documents import ROOT

_ROW = re.compile(r"^\| (?P<who>[^|]+) \| (?P<promise>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>test_\w+)`")


def _promises() -> list[tuple[str, str]]:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.split("## What holds this\n")[1].split("\n## ")[0]
    return [(row["promise"], row["tests"]) for row in _ROW.finditer(section)][1:]


PROMISES = [one for one in _promises() if not one[0].startswith("---")]


def test_there_are_promises_for_everybody() -> None:
    assert len(PROMISES) >= 17


@pytest.mark.parametrize(("promise", "tests"), PROMISES, ids=[one[0][:40] for one in PROMISES])
def test_a_promise_names_tests_that_there_are(promise: str, tests: str) -> None:
    named = list(_TEST.finditer(tests))
    assert named
    assert _TEST.sub("", tests).strip() == ""  # each word is a test's name, none a whole file's
    for one in named:
        tree = ast.parse((ROOT / one["file"]).read_text(encoding="utf-8"))
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        known = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
        assert one["name"] in known, f"{one[0]} is no test"
