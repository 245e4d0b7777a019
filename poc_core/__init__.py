"""Shared by API, workers and commands: proof arithmetic, records, settings and state in Redis.

Importing this package imports nothing else: the API must stay free of torch.
"""
