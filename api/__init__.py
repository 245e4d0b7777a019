"""FastAPI: HTTP in, Redis and Celery out. Imports neither torch nor vLLM: a front end is small
and starts at once.
"""
