"""Admits jobs and rounds, stores them, wakes workers, and waits for results."""
