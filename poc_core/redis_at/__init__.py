"""The url of Redis, and connections to it."""
