"""Celery's side of a worker: broker, application, tasks and what they work with."""
