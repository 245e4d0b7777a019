"""Chat that other nodes can validate. Known tokens are the tokens of another node's answer."""
