"""Chat that other nodes can validate; known tokens are the tokens of another node's answer."""
