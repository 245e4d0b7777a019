"""Shares of what all have in common, by client: an event loop, a compiler of grammars."""
