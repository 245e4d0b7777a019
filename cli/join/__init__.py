"""Joining: the operator invites a host (command `hosts`), which joins the node with a token that
works once.
"""
