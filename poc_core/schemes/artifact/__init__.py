"""Artifact proofs, the current scheme (protocol.md, section 2)."""
