"""The FastAPI application. It stores work in Redis, and imports neither torch nor vLLM."""
