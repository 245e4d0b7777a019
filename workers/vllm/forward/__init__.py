"""Runs micro-batches through vLLM's model, slice by slice."""
