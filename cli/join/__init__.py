"""How an operator invites a host, and how the host joins with one token."""
