"""Code that API, workers and commands share. Modules that the API imports must not import torch."""
