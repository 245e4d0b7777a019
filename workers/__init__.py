"""Celery workers and the engines that they host."""
