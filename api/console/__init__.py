"""The console at /console: its view of the node, and its page."""
