"""What computes: an engine is a class with a loaded model; `workers/load.py` picks one."""
