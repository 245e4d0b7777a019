"""What decode proofs need inside vLLM: kept caches, seeded gates, recorded steps."""
