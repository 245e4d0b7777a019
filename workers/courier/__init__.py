"""The courier, which delivers callbacks from Redis to their receivers."""
