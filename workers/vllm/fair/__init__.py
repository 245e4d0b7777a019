"""Shares an engine's event loop and grammar compiler fairly among clients."""
