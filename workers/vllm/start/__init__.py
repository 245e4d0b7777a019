"""Starts a vLLM engine and tests it before it takes work."""
