"""Events that only this API process sees, written to Redis for history and events."""
