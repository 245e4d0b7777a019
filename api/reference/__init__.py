"""The API's reference pages, rendered by Swagger UI and ReDoc."""
