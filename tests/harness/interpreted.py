"""Runs what holds Triton's kernels against plain torch, by Triton's interpreter, which wants a
process that has it from the beginning: one for all tests, as its imports take seconds.
"""

import atexit
import json
import os
import subprocess
import sys
from functools import cache

import pytest

SERVE = """
import importlib, json, sys, traceback
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    module, call = json.loads(line)
    wrong = ""
    try:
        exec(f"here.{call}", {"here": importlib.import_module(module)})
    except BaseException:
        wrong = traceback.format_exc()
    print(json.dumps(wrong), file=answers, flush=True)
"""


@cache
def interpreter() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # which ends it
    return process


def run_interpreted(module: str, call: str) -> None:
    """Calls a function of the module, as in "check(True)"; skips where there is no Triton."""
    pytest.importorskip("triton")
    process = interpreter()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([module, call]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, f"{module}.{call} ended the interpreter"
    wrong = json.loads(answer)
    assert not wrong, wrong[-2000:]
