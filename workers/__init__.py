"""Celery workers and their engines."""
