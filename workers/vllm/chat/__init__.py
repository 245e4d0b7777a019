"""Chats that the network checks: known tokens, their logprobs, answers with token ids."""
