"""Names of engines and number formats, without imports: keeps `proofline --help` quick."""

from typing import Literal

from poc_core.serving.dtypes import Dtype as Dtype

EngineKind = Literal["vllm", "transformers", "synthetic"]
