"""No test says how fast something is: a busy machine would refuse a change for it. Nor does any
sleep and then assert: on a busy machine nothing has happened yet.

Benchmarks do, as ratios in one run; a hang is found by pytest's timeout.
"""

import ast
import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ("tests", "bench/tests", "scripts/tests")
CLOCKS = {"monotonic", "time", "perf_counter"}
WAITS = {"wait", "wait_until"}  # which return how long it took
LEAST_S = 20.0
NEED_TIME = {
    "test_lifeline.py",  # nothing must happen in a real time, and there is no event to wait for
    "test_chat_gate.py",  # its seconds are those of a clock in the test's hands
}


def is_elapsed(node: ast.expr) -> bool:
    """Whether it is a clock's time less an earlier one, or the seconds of a wait."""
    match node:
        case ast.BinOp(left=ast.Call(func=ast.Attribute(attr=name)), op=ast.Sub()):
            return name in CLOCKS
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[ast.Lambda(), *_]):
            return name in WAITS
    return False


@lru_cache(1)
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def upper_bounds(source: str) -> Iterator[int]:
    """The lines of assertions that so many seconds have not passed."""
    for node in nodes_of(source):
        if isinstance(node, ast.Assert):
            for found in ast.walk(node.test):
                if isinstance(found, ast.Compare):
                    sides = [found.left, *found.comparators]
                    for left, op, right in zip(sides, found.ops, sides[1:], strict=False):
                        is_less = isinstance(op, ast.Lt | ast.LtE) and is_elapsed(left)
                        if is_less or (isinstance(op, ast.Gt | ast.GtE) and is_elapsed(right)):
                            yield node.lineno


def sleeps_then_asserts(source: str) -> Iterator[int]:
    """The lines of sleeps that an assertion follows; `asyncio.sleep(0)` lets others go on."""
    for node in nodes_of(source):
        body = getattr(node, "body", None)
        for one, following in itertools.pairwise(body if isinstance(body, list) else ()):
            while isinstance(one, ast.With | ast.AsyncWith):
                one = one.body[-1]
            match one:
                case ast.Expr(
                    ast.Call(func=ast.Attribute(attr="sleep"), args=[seconds])
                ) | ast.Expr(
                    ast.Await(ast.Call(func=ast.Attribute(attr="sleep"), args=[seconds]))
                ) if isinstance(following, ast.Assert) and ast.unparse(seconds) != "0":
                    yield one.lineno


def short_waits(source: str) -> Iterator[int]:
    """The lines of assertions that something comes within less than LEAST_S seconds."""
    for node in nodes_of(source):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.UnaryOp):
            for found in ast.walk(node.test):
                match found:
                    case ast.Call(
                        func=ast.Attribute(attr="wait" | "result"),
                        args=[ast.Constant(value=int() | float() as seconds)],
                    ) if seconds < LEAST_S and not is_none_wanted(node.test):
                        yield node.lineno


def is_none_wanted(test: ast.expr) -> bool:
    """As in `assert future.result(0.05) is None`: nothing has come."""
    return isinstance(test, ast.Compare) and ast.unparse(test).endswith("is None")


@pytest.mark.parametrize(
    ("check", "source", "lines"),
    [
        (sleeps_then_asserts, "time.sleep(0.1)\nassert done == []", [1]),
        (sleeps_then_asserts, "async def f():\n    await asyncio.sleep(A)\n    assert done", [2]),
        (sleeps_then_asserts, "with pool:\n    time.sleep(0.1)\nassert done == []", [2]),
        (sleeps_then_asserts, "await asyncio.sleep(0)\nassert done == []", []),
        (sleeps_then_asserts, "while not done:\n    time.sleep(0.1)\nassert done", []),
        (short_waits, "assert event.wait(1)", [1]),
        (short_waits, "assert [one.result(1)['n'] for one in answers] == [2]", [1]),
        (short_waits, "assert event.wait(60)", []),
        (short_waits, "assert not event.wait(0.1)", []),
        (short_waits, "assert future.result(0.05) is None", []),
        (upper_bounds, "assert time.monotonic() - began < 5", [1]),
        (upper_bounds, "assert 0.3 <= time.time() - began <= 5", [1]),
        (upper_bounds, "assert 5 > monotonic.monotonic() - began", [1]),
        (upper_bounds, "assert client.wait(lambda: True, 60, 'chat') < 1.0", [1]),
        (upper_bounds, "assert time.monotonic() - began >= 0.3", []),
        (upper_bounds, "while time.monotonic() - began < 5: pass", []),
    ],
)
def test_what_counts_as_one(
    check: Callable[[str], Iterator[int]], source: str, lines: list[int]
) -> None:
    assert list(check(source)) == lines


def test_every_wait_is_for_an_event_with_a_generous_limit_and_none_must_be_short() -> None:
    found = list[str]()
    paths = [path for folder in TESTS for path in (ROOT / folder).rglob("test_*.py")]
    for path in paths:
        source = path.read_text()
        lines = [*upper_bounds(source)]
        if path.name not in NEED_TIME:
            lines += [*sleeps_then_asserts(source), *short_waits(source)]
        found += [f"{path.relative_to(ROOT)}:{line}" for line in lines]
    assert found == []
    assert len(paths) > 300
