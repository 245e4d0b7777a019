"""The engines. Each engine class holds a loaded model; `workers/load.py` chooses the class."""
