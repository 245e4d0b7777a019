"""Checks OpenAI requests and forwards them to the workers."""
