"""vLLM's own OpenAI server, and what it answers."""
