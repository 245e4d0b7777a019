"""Number formats in which an engine may compute; imports nothing, so --help is quick."""

from typing import Literal

# Proofs are known to be right in float32 and bfloat16; float16 overflows in some models.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# vLLM's other names for them.
ALSO = {"half": "float16", "float": "float32"}


def dtype_of(word: str) -> str:
    """The number format by the name that it has here."""
    return ALSO.get(word, word)
