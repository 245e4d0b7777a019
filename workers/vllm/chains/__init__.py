"""Decode proofs inside vLLM: kept caches, seeded gates, recorded steps."""
