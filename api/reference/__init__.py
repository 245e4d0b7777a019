"""The API's reference for people, by Swagger UI and ReDoc."""
