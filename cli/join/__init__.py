"""Joining: the operator invites a host, which joins the node with a token that works once."""
