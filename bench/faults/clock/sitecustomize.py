"""A clock that jumps: processes with this folder in PYTHONPATH add seconds to time.time().

The file that PROOFLINE_TEST_CLOCK names holds them: clocks of hosts that are wrong or set anew.
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
