"""Chat that other nodes can validate: known tokens (another node's answer), logprobs, token ids."""
