"""The commands that call a running API."""
