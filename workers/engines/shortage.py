"""Distinguishes errors caused by a lack of device memory from all other errors."""

import re

# Texts of a RuntimeError: from torch on a CPU, and from vLLM's operations with torch's stable
# interface, which report only that they got no tensor (vLLM 0.30, a full H200).
NO_MEMORY = re.compile(
    r'not enough memory|torch_call_dispatcher\( *"aten::(new_)?(empty|zeros|full)\w*".*call failed'
)


def is_of_memory(error: Exception) -> bool:
    """Returns True if an operation failed because the device had too little memory."""
    import torch  # imported here: processes that only read logs may lack torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))
    )


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text; its type if it has none, as MemoryError."""
    return (str(error) or type(error).__name__).splitlines()[0]
