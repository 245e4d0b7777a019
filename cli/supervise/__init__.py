"""Processes that are started, watched, restarted and stopped."""
