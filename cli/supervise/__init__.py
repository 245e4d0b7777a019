"""Starts, supervises, restarts and stops the processes of this machine."""
