"""Commands that compute proofs or chats in their own process, and compare or evaluate them."""
