"""Starts a vLLM engine, and tests the engine before it takes work."""
