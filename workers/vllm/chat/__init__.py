"""Chat that other nodes can validate, shared fairly among clients. Known tokens: see known_tokens.py."""
