"""Bodies, examples and OpenAPI's description of the routes."""
