"""Determines the node's health, for all that report it, and the node's Prometheus metrics."""
