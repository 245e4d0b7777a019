"""What an engine and its number format may be called. Apart from the options, for a quick
`proofline --help`.
"""

from typing import Literal

from poc_core.serving.dtypes import Dtype as Dtype

EngineKind = Literal["vllm", "transformers", "synthetic"]
