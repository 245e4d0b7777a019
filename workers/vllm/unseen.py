"""What was written for GPUs and no GPU has shown yet: off, unless an engine's environment asks.

Who tries it on a GPU sets PROOFLINE_UNSEEN=on. Once seen to be right, it is on for all.
"""

import os

import torch

SWITCH = "PROOFLINE_UNSEEN"


def is_on() -> bool:
    """Whether this engine computes with what no GPU has shown yet."""
    return os.environ.get(SWITCH) == "on"


def why_no_chains(device: torch.device, has_states: bool, routes_by_token: bool) -> str | None:
    """Why decode proofs of a model are refused that were right on CPUs, or nowhere yet."""
    if device.type != "cuda" or is_on() or not (has_states or routes_by_token):
        return None
    what = "its layers keep states" if has_states else "it chooses experts by token"
    return (
        f"Decode proofs of this model were not seen to be right on a GPU yet ({what});"
        f" {SWITCH}=on in the worker's environment tries them."
    )
