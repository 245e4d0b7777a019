"""The commands that ask a running API."""
