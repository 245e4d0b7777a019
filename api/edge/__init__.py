"""Checks requests before any route runs: connections, foreign web pages, keys, body sizes."""
