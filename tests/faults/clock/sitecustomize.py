"""A clock that jumps: every process that is started with this folder in PYTHONPATH adds to
time.time() what the file that PROOFLINE_TEST_CLOCK names holds, in seconds. It stands for
clocks of hosts that are wrong or set anew.
"""

import os
import time

_file = os.environ.get("PROOFLINE_TEST_CLOCK")
_real = time.time


def _jumped() -> float:
    try:
        with open(str(_file)) as text:
            return _real() + float(text.read() or 0)
    except (OSError, ValueError):
        return _real()


if _file:
    time.time = _jumped
