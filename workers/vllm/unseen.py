"""What was written for GPUs and no GPU has measured yet: off, unless an engine's environment asks.

Who tries it on a GPU sets PROOFLINE_UNSEEN=on. Once seen to be right and to gain, it is on for all.
"""

import os

SWITCH = "PROOFLINE_UNSEEN"


def is_on() -> bool:
    """Whether this engine computes with what no GPU has measured yet."""
    return os.environ.get(SWITCH) == "on"
