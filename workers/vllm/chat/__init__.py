"""Chats that the network checks: known tokens, their logprobs, answers that tell token ids."""
