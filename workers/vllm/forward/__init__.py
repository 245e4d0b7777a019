"""Micro-batches through vLLM's model, slice by slice."""
