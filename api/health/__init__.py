"""The node's health: one verdict, shared by all answers that report it."""
