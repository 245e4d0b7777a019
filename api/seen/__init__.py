"""Events that only this API process sees, written to Redis for the history and the event log."""
