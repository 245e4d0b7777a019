"""Celery in a worker: broker connection, application, Flower, and wake-up messages."""
