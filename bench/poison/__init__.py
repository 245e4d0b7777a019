"""Requests that could end an engine, made from vLLM's own request models (`make fuzz`)."""
