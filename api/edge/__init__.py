"""Checks each request before its route runs: connections, foreign web pages, keys, body size."""
