"""This machine's GPUs, memory and cores."""
