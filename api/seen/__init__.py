"""Counts this API process's chats and refused requests, and writes the counts to Redis."""
