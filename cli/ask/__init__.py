"""The commands that send requests to a running API."""
