"""Determines the node's health, for all routes and pages that report it."""
