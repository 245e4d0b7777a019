"""The number formats (dtypes) of engines. Imports almost nothing, so that --help is quick."""

from typing import Literal

# Proofs are verified in float32 and bfloat16; float16 overflows in some models.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# vLLM's other names of number formats.
ALSO = {"half": "float16", "float": "float32"}


def dtype_of(word: str) -> str:
    """Returns the usual name of a dtype of vLLM: float16 for half, float32 for float."""
    return ALSO.get(word, word)
