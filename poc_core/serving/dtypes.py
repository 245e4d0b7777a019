"""The number formats of engines. Imports nothing, so that --help is quick."""

from typing import Literal

# Proofs are verified in float32 and bfloat16; float16 overflows in some models.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# vLLM's aliases.
ALSO = {"half": "float16", "float": "float32"}


def dtype_of(word: str) -> str:
    """Converts vLLM's name of a number format to the name in `Dtype`."""
    return ALSO.get(word, word)
