"""Checks of requests before any route: connections, foreign web pages, keys, body sizes."""
