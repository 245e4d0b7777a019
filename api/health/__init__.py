"""Whether the node works, and what of it does not: one answer for all who ask."""
