"""Callbacks in Redis: the outboxes, their entries, and receivers that do not answer."""
