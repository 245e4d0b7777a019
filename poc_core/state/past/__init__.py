"""History: counts by time steps, and events, kept in Redis for the operator."""
