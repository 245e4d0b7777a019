"""The arithmetic that all proof schemes share."""
