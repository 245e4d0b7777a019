"""What it is worth to keep a conversation on the engine that has its prefix."""
