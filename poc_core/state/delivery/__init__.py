"""Callbacks in Redis: outboxes, their entries, their receivers."""
