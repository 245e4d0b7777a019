"""Starts, watches, restarts and stops processes."""
