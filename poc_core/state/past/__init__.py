"""History: counts per time step, and events, stored for the operator."""
