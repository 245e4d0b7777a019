"""Builds the answer of GET /api/v1/metrics, for the network's monitoring (its schema v1)."""
