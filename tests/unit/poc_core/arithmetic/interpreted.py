"""Runs what holds Triton's kernels against plain torch, by Triton's interpreter, which wants a
process that has it from the beginning."""

import os
import subprocess
import sys

import pytest


def run_interpreted(module: str, call: str) -> None:
    """Calls a function of the module, as in "check(True)"; skips where there is no Triton."""
    pytest.importorskip("triton")
    ended = subprocess.run(
        [sys.executable, "-c", f"import {module} as here; here.{call}"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
