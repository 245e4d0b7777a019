"""Reads Redis once for concurrent requests of many clients."""
