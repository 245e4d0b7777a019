"""Decode proofs (protocol.md, section 8)."""
