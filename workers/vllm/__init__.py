"""The vLLM integration: the engine, the code inside vLLM's processes, the gated chat server."""
