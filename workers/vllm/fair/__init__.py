"""Fair shares of what all chats of an engine's server use together: its event loop, its
grammars.
"""
