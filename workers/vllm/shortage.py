"""Tells memory that is short from all else that can fail in an engine."""

import re

# In a RuntimeError: torch on a CPU, and vLLM's operations of torch's stable interface, which say
# only that they got no tensor of theirs (vLLM 0.30, a full H200).
NO_MEMORY = re.compile(
    r'not enough memory|torch_call_dispatcher\( *"aten::(new_)?(empty|zeros|full)\w*".*call failed'
)


def is_of_memory(error: Exception) -> bool:
    """True if an operation failed because the device had too little memory."""
    import torch  # here: who reads logs has none

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))
    )
