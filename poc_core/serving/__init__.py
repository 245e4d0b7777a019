"""Serving of models: deployments, vLLM's arguments, OpenAI's paths and errors."""
