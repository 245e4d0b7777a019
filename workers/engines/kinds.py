"""Names of engines and number formats. Few imports keep `proofline --help` quick."""

from typing import Literal

from poc_core.serving.dtypes import Dtype as Dtype

EngineKind = Literal["vllm", "transformers", "synthetic"]
# How known tokens of chats are scored; `auto`: as a trial at start-up decides.
Validation = Literal["auto", "pass", "steps"]
# The tokens in logprobs: decimal ids, for the network's validators, or text for other clients.
LogprobTokens = Literal["ids", "text"]
