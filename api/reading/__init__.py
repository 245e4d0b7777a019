"""Shared reads: concurrent requests of many clients read Redis once."""
