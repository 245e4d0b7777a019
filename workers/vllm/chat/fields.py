"""How the server's side tells the engine's side what a request asks for: names in `vllm_xargs`,
which vLLM hands on as `SamplingParams.extra_args`. A client's own entries of these names are
dropped on the way in.

A beam search gets none of them (vLLM makes its parameters anew), so the server's side refuses known
tokens with it."""

from __future__ import annotations

# A list of ints: the answer's tokens, in the vocabulary, and few enough for the context.
KNOWN_TOKENS = "proofline_known_tokens"
# "raw_logprobs" or "processed_logprobs"; without it: the deployment's --logprobs-mode.
LOGPROBS_MODE = "proofline_logprobs_mode"
# 1: the answer's tokens shall be their ids in decimal.
TOKEN_IDS = "proofline_token_ids"
# What the engine's side tells its ranks; nothing that comes from outside.
PASS = "proofline_pass"

NAMES = (KNOWN_TOKENS, LOGPROBS_MODE, TOKEN_IDS, PASS)
