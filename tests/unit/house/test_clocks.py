"""No test says how fast something is: a busy machine would refuse a change for it.

Benchmarks do, as ratios in one run; a hang is found by pytest's timeout.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
CLOCKS = {"monotonic", "time", "perf_counter"}
WAITS = {"wait", "wait_until"}  # which return how long it took


def is_elapsed(node: ast.expr) -> bool:
    """Whether it is a clock's time less an earlier one, or the seconds of a wait."""
    match node:
        case ast.BinOp(left=ast.Call(func=ast.Attribute(attr=name)), op=ast.Sub()):
            return name in CLOCKS
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[ast.Lambda(), *_]):
            return name in WAITS
    return False


def upper_bounds(source: str) -> Iterator[int]:
    """The lines of assertions that so many seconds have not passed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for found in ast.walk(node.test):
                if isinstance(found, ast.Compare):
                    sides = [found.left, *found.comparators]
                    for left, op, right in zip(sides, found.ops, sides[1:], strict=False):
                        is_less = isinstance(op, ast.Lt | ast.LtE) and is_elapsed(left)
                        if is_less or (isinstance(op, ast.Gt | ast.GtE) and is_elapsed(right)):
                            yield node.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("assert time.monotonic() - began < 5", [1]),
        ("assert 0.3 <= time.time() - began <= 5", [1]),
        ("assert 5 > monotonic.monotonic() - began", [1]),
        ("assert client.wait(lambda: True, 60, 'chat') < 1.0", [1]),
        ("assert time.monotonic() - began >= 0.3", []),
        ("while time.monotonic() - began < 5: pass", []),
    ],
)
def test_what_counts_as_one(source: str, lines: list[int]) -> None:
    assert list(upper_bounds(source)) == lines


def test_no_test_asserts_that_few_seconds_have_passed() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in TESTS.rglob("test_*.py")
        for line in upper_bounds(path.read_text())
    }
    assert found == set()
