"""What an engine and its number format may be called. Apart from the options, for a quick
`proofline --help`.
"""

from typing import Literal

from poc_core.serving.dtypes import Dtype as Dtype

EngineKind = Literal["vllm", "transformers", "synthetic"]
# Whose decoder layers are reflected: those that the network's own nodes find, or every model's.
LayerReflections = Literal["fleet", "all"]
# Whether steps of decode proofs run as CUDA graphs: never, or wherever that gives the same.
DecodeGraphs = Literal["off", "auto"]
