"""Computes proofs with vLLM's model in slices of a few layers, between which chat can run."""
