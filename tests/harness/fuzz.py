"""How many examples hypothesis makes up; to be imported where it is used.

`make test`: the same few every time; `make fuzz` (PROOFLINE_FUZZ=long): ever new ones.
"""

import os

import hypothesis
import pytest

# How soon examples are made says how busy the machine is.
TOO_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "quick",
    max_examples=25,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=TOO_SLOW,
)
hypothesis.settings.register_profile(
    "long",
    max_examples=2000,
    stateful_step_count=100,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=TOO_SLOW,
)
hypothesis.settings.load_profile(os.environ.get("PROOFLINE_FUZZ") or "quick")

# The mark of what `make fuzz` runs.
FUZZ = pytest.mark.fuzz
