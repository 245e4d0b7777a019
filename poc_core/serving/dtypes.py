"""Number formats in which proofs are known to be right; imports nothing, so --help is quick."""

from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16"]
