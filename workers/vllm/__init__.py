"""The vLLM integration: the engine, our code inside vLLM's processes, and the chat server."""
