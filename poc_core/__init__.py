"""What API, workers and command share: proof arithmetic, records, settings and the state in Redis.

Importing this package imports nothing else: the API must stay free of torch.
"""
