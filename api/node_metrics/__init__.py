"""GET /api/v1/metrics: the metrics for the network's monitoring (its schema v1)."""
