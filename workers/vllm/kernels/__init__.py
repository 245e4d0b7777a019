"""Kernels between a model's matrix products, and the trials that compare them with vLLM's."""
