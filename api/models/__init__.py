"""Manages models on this machine's disk, and deploys a model on the node's hosts."""
