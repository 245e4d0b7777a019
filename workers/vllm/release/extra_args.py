"""The names of our entries in vLLM's `SamplingParams.extra_args`. Does not import vLLM."""

# A list of ints: the answer's tokens, within the vocabulary.
KNOWN_TOKENS = "proofline_known_tokens"
# "raw_logprobs" or "processed_logprobs"; the deployment's --logprobs-mode if absent.
LOGPROBS_MODE = "proofline_logprobs_mode"
# 1: tokens in the answer are named by their decimal ids.
TOKEN_IDS = "proofline_token_ids"
# Internal, from the engine's front end to its ranks; never accepted from a client.
PASS = "proofline_pass"

NAMES = (KNOWN_TOKENS, LOGPROBS_MODE, TOKEN_IDS, PASS)
