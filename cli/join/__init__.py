"""Joining: the operator invites a host to a node, and the host joins with a token that
works once.
"""
