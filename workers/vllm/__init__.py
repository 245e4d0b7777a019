"""Code on and in vLLM: the engine, the code inside its processes, the gated chat server."""
