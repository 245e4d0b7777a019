"""Request bodies, examples and the OpenAPI document."""
