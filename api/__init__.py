"""The FastAPI application. Stores jobs and rounds in Redis; imports neither torch nor vLLM."""
