"""Chats and refusals of this API process, written to Redis for the history and the event log."""
