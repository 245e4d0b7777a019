"""What was written for GPUs and no GPU has shown yet: off, unless an engine's environment asks.

Who tries it on a GPU sets PROOFLINE_UNSEEN=on. Once seen to be right, it is on for all.
"""

import os

import torch

SWITCH = "PROOFLINE_UNSEEN"


def is_on() -> bool:
    """Whether this engine computes with what no GPU has shown yet."""
    return os.environ.get(SWITCH) == "on"


def why_no_chains(device: torch.device, routes_by_token: bool) -> str | None:
    """Why decode proofs of a model are refused on a GPU that were right on CPUs alone."""
    if device.type != "cuda" or is_on() or not routes_by_token:
        return None
    return (
        "Decode proofs of this model were not seen to be right on a GPU yet (it chooses experts by"
        f" token); {SWITCH}=on in the worker's environment tries them."
    )
