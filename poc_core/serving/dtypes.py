"""The number formats in which proofs are known to be right. Apart from all else, for a quick
`proofline --help`.
"""

from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16"]
