"""The commands that compute in their own process, without a queue."""
