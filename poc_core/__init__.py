"""Code that API, workers and commands share. The package imports none of its modules, because the
API must not import torch.
"""
