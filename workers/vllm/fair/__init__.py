"""Shares of what all chats of an engine's server have in common: its event loop, its grammars."""
