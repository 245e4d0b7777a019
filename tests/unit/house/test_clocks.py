"""No test says how fast something is, nor sleeps and then asserts, nor waits briefly for an event:
a busy machine would refuse a change for it. Hangs are found by pytest's timeout.
"""

import ast
import re
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[3]
NEED_TIME = {
    "test_lifeline.py",  # nothing must happen in a real time, and there is no event to wait for
    "test_chat_gate.py",  # its seconds are those of a clock in the test's hands
}
CLOCK = r"\.(?:monotonic|time|perf_counter)\(\) - "
# Of sources as ast.unparse writes them: a statement a line, without comments.
BOUNDS = rf"^ *assert .*(?:{CLOCK}[^<>\n]* <|>=? \w+{CLOCK}|\bwait(?:_until)?\(lambda.*\) <)"
SLEEP = r"(?:await )?\w+\.sleep\((?!0\)).*\n"
SLEEPS = rf"^( *){SLEEP}\1assert|^( *)(?:async )?with .*:\n(?:\2 .*\n)*?\2    {SLEEP}\2assert"
WAIT = r"(?:wait\(|result\(|get\(timeout=)"
SHORT = rf"^ *assert (?!not ).*\.{WAIT}(?:[1-5]?\d(?:\.\d+)?)(?:\)|, \w+=)(?!.* is None$)"
PLANTED = {
    BOUNDS: """
assert time.monotonic() - began < 5
assert 0.3 <= time.time() - began <= 5
assert 5 > monotonic.monotonic() - began
assert client.wait(lambda: True, 60, 'chat') < 1.0
""",
    SLEEPS: """
time.sleep(0.1); assert done == []
async def f(): await asyncio.sleep(A); assert done
with pool: time.sleep(0.1)
assert done == []
""",
    SHORT: """
assert event.wait(1, urgent=True)
assert [one.result(1)['n'] for one in answers] == [2]
assert heard.get(timeout=30) == 2
""",
}
ALLOWED = """
assert time.monotonic() - began >= 0.3
while time.monotonic() - began < 5: time.sleep(0.1)
assert done
await asyncio.sleep(0); assert done == []
assert event.wait(60)
assert not event.wait(0.1)
assert future.result(0.05) is None
"""


def found(source: str, *patterns: str) -> list[str]:
    text = ast.unparse(ast.parse(source))
    return [m[0] for pattern in patterns for m in re.finditer(pattern, text, re.MULTILINE)]


def test_every_wait_is_for_an_event_with_a_generous_limit_and_none_must_be_short() -> None:
    assert [len(found(text, one)) for one, text in PLANTED.items()] == [4, 3, 3]
    assert found(ALLOWED, *PLANTED) == []
    folders = (ROOT / folder for folder in ("tests", "bench/tests", "scripts/tests"))
    paths = list(chain.from_iterable(folder.rglob("test_*.py") for folder in folders))
    wrong = {
        str(path.relative_to(ROOT)): found(
            path.read_text(), *([BOUNDS] if path.name in NEED_TIME else PLANTED)
        )
        for path in paths
    }
    assert {path: lines for path, lines in wrong.items() if lines} == {}
    assert len(paths) > 300
