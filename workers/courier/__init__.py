"""The courier: what takes callbacks from Redis to their receivers."""
