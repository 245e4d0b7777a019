"""Commands that compute or compare proofs and chat answers outside a node's queue."""
