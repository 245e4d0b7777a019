"""Tells memory that is short from all else that can fail in an engine."""

import re

import torch

# In a RuntimeError: torch on a CPU, and vLLM's operations of torch's stable interface, which say
# only that they got no tensor of theirs (vLLM 0.30, a full H200).
_NO_MEMORY = re.compile(
    r"not enough memory"
    r'|torch_call_dispatcher\(\s*"aten::(new_)?(empty|zeros|full)\w*",.*API call failed',
    re.DOTALL,
)


def is_of_memory(error: Exception) -> bool:
    """Whether an operation failed because the device had too little memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
    )
