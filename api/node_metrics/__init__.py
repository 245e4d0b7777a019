"""GET /api/v1/metrics: what the network's monitoring reads of a node (its schema v1)."""
