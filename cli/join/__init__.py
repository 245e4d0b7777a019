"""Joining: an operator invites a host, and the host joins with one token."""
