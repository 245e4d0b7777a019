"""What this process alone sees of the node, told to Redis for its history and its events."""
