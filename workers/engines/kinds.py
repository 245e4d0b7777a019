"""What an engine and its number format may be called. Apart from the options, for a quick
`proofline --help`.
"""

from typing import Literal

EngineKind = Literal["vllm", "transformers", "synthetic"]
Dtype = Literal["auto", "float32", "bfloat16"]
