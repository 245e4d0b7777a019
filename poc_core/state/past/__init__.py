"""What the node did: counts by steps of time, and events, kept in Redis for its operator."""
