"""Computes proofs with vLLM's model, a few layers at a time (a slice), so that chat can run in
between.
"""
