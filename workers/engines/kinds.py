"""Names of engines and number formats, without imports: keeps `proofline --help` quick."""

from typing import Literal

from poc_core.serving.dtypes import Dtype as Dtype

EngineKind = Literal["vllm", "transformers", "synthetic"]
# How chats whose tokens are known are scored: in one forward, by decode steps, or as a trial at
# start-up finds.
Validation = Literal["auto", "pass", "steps"]
# What logprobs call their tokens: ids in decimal, as the network's validators read them, or text
# for plain clients.
LogprobTokens = Literal["ids", "text"]
