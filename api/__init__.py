"""FastAPI: HTTP in, Redis and Celery out; without torch and vLLM, so that it starts at once."""
