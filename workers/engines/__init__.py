"""Engines: classes that each hold a loaded model. `workers/load.py` chooses the class."""
