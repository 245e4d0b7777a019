"""Code that API, workers and commands share: proof arithmetic, records, settings, Redis state.

Importing the package imports none of its modules, because the API must not import torch.
"""
