"""The number formats of engines. Imports nothing, so that --help is quick."""

from typing import Literal

# Proofs are verified in float32 and bfloat16; float16 overflows in some models.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# vLLM's other names of number formats.
ALSO = {"half": "float16", "float": "float32"}


def dtype_of(word: str) -> str:
    """Returns the name in `Dtype` of a number format in vLLM's words."""
    return ALSO.get(word, word)
