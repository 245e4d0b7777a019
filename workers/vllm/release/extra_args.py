"""What of ours travels in `SamplingParams.extra_args`; no vLLM here."""

# A list of ints: the answer's tokens, in the vocabulary.
KNOWN_TOKENS = "proofline_known_tokens"
# "raw_logprobs" or "processed_logprobs"; without it: the deployment's --logprobs-mode.
LOGPROBS_MODE = "proofline_logprobs_mode"
# 1: the answer's tokens shall be their ids in decimal.
TOKEN_IDS = "proofline_token_ids"
# What the engine's side tells its ranks; nothing that comes from outside.
PASS = "proofline_pass"

NAMES = (KNOWN_TOKENS, LOGPROBS_MODE, TOKEN_IDS, PASS)
