"""What runs on or in vLLM: its engine, the code inside its processes, the gated chat server."""
