"""What was written for GPUs and no GPU has shown yet: off, unless an engine's environment asks.

Who tries it on a GPU sets PROOFLINE_UNSEEN=on. Once seen to be right, it is on for all.
"""

import os

SWITCH = "PROOFLINE_UNSEEN"


def is_on() -> bool:
    """Whether this engine computes with what no GPU has shown yet."""
    return os.environ.get(SWITCH) == "on"
