"""How models are served: deployments, vLLM's arguments, OpenAI's paths and errors."""
