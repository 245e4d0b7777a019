"""Shared reads: requests of many clients at the same moment read Redis once."""
